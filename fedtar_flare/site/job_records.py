"""Records in the site's own folder that bind all jobs: one run for each, and one layout of its data in cells."""

from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, ExchangeError, FedTARError
from fedtar_flare.core.files import PRIVATE, locked, read_json, write_json
from fedtar_flare.data.cells import extends
from fedtar_flare.site.admission import Declined

RUNS, CELLS, ANSWERS, DRAFTS = "runs.json", "cells.json", "answers.json", "drafts.json"
_NEWEST, _REFUSED = "newest", "refused"
ENDED = "ended "
"""Before the run of a job whose state was deleted."""
MAX_REFUSED = 3
"""Too early first days of a next period that are refused: each refusal tells that the newest visit came later."""

CellLayout = Mapping[str, str]
"""Settings that decide which visits share a cell and which cells are reported: ``time_steps``, ``timeline``,
``min_cell``, and ``score``, because scores of all and of the test patients tell those of the others by subtraction."""


def bind_run(records: Path, job: str, run_id: str, resumes: str) -> None:
    """Bind a job to its run at first use."""
    with locked(file := records / RUNS):
        runs = read_record(file)
        if ENDED + run_id in runs.values() or runs.get(job, "").startswith(ENDED):
            raise ExchangeError("the site has deleted its state of the run, which has ended here")
        if runs.get(job, run_id) != run_id:
            raise ExchangeError("the job has begun another run at this site; a job has one")
        missed = run_id if resumes or run_id not in runs.values() else ""
        if job not in runs and runs.get(resumes, missed) != run_id:
            raise ExchangeError("the run is that of another job, which this one does not resume")
        write_json(file, runs | {job: run_id}, PRIVATE)


def end_runs(records: Path, ended: Collection[str]) -> None:
    """End runs whose state is deleted, and with it what was asked already; an approval is for one run."""
    if not (file := records / RUNS).exists():
        return
    with locked(file):
        runs = read_record(file)
        write_json(file, {job: ENDED + run if run in ended else run for job, run in runs.items()}, PRIVATE)


def count_answer(records: Path, data: str, most: int | None) -> None:
    """Count a training task before it is done; :class:`Declined` where the data's share of answers is used up."""
    with locked(file := records / ANSWERS):
        counts = read_record(file)
        if most is not None and counts.get(data, 0) >= most:
            raise Declined(f"declined: the site answers {most} training tasks on its data, in all jobs (max_answers)")
        write_json(file, counts | {data: counts.get(data, 0) + 1}, PRIVATE)


def may_score_drafts(records: Path, data: str, marks: Collection[str], least: int) -> bool:
    """Decide whether a candidate's drafts may be scored, and remember them, by keyed marks of patients at time steps.

    A mark begins with its step's number. The difference of two scores of a step would tell of the patients whose drafts
    differ there, if these are fewer than a minimum cell.
    """
    if least == 1:
        return True
    with locked(file := records / DRAFTS):
        scored, new = read_record(file), set(marks)
        for earlier in map(set, scored.get(data, ())):
            come, gone = (Counter(mark.split()[0] for mark in part) for part in (new - earlier, earlier - new))
            if any(patients < least for patients in (come | gone).values()):  # at each step the larger of both
                return False
        if sorted(new) not in scored.get(data, ()):
            write_json(file, scored | {data: [*scored.get(data, ()), sorted(new)]}, PRIVATE)
        return True


def fix_cells(records: Path, data: str, layout: CellLayout, newest: str = "", *, begins: bool = True) -> None:
    """Fix the cells of a data set, as the first job requests."""
    with locked(file := records / CELLS):
        cells = read_record(file)
        before = cells.get(data, {})
        if not (before or begins):
            return
        if conflicts := layout_conflicts(records, data, layout):
            added, refused = extends(before.get("timeline", ""), layout.get("timeline", "")), before.get(_REFUSED, [])
            if added and added[0] not in refused and len(refused) < MAX_REFUSED:
                write_json(file, cells | {data: {**before, _REFUSED: [*refused, added[0]]}}, PRIVATE)
            raise Declined(f"declined: {'; '.join(conflicts)}")
        now = {**before, **layout}
        if newest:
            now[_NEWEST] = max(newest, before.get(_NEWEST, ""))
        if now.get("timeline") != before.get("timeline"):
            now.pop(_REFUSED, None)
        if now != before:
            write_json(file, cells | {data: now}, PRIVATE)


def layout_conflicts(records: Path, data: str, layout: CellLayout) -> list[str]:
    """Compare a job's layout with the one that was fixed for the data.

    The difference of two cells of different layouts can be a single visit, and multiples of two smallest cells tell a
    number exactly. Periods may be added that begin after every visit counted so far, so that no cell loses one, and not
    after tomorrow, unless all dates are shifted.
    """
    fixed = {**layout, **read_record(records / CELLS).get(data, {})}
    if added := extends(fixed.get("timeline", ""), layout.get("timeline", "")):
        if len(refused := fixed.get(_REFUSED, ())) >= MAX_REFUSED and added[0] not in refused:
            return [f"a period after {len(refused)} refused ones: until the site runs 'fedtar site cells --release'"]
        if fixed.get(_NEWEST, "9") >= added[0]:
            return [f"a period from {added[0][:10]} on: it begins before visits that were counted already"]
        if added[-1] > (datetime.now() + timedelta(days=1)).isoformat() > fixed[_NEWEST]:
            return [f"a period from {added[-1][:10]} on: that day has not come"]
        fixed |= {name: layout[name] for name in ("timeline", "time_steps")}
    differing = {name: value for name, value in layout.items() if fixed.get(name) != value}
    text = ", ".join(f"{name} {value:.80} (so far {fixed.get(name)!s:.80})" for name, value in differing.items())
    return [f"{text}: until the site runs 'fedtar site cells --release', all jobs have the same"] if differing else []


def read_record(file: Path) -> dict[str, Any]:
    """Read a record."""
    try:
        return read_json(file) if file.exists() else {}
    except ConfigError as error:
        raise FedTARError(str(error), public="the site's record of its jobs cannot be read") from error
