"""A site's clock that is set back or ahead resets no account, and lets nothing be asked again."""

import time
from datetime import datetime

import pytest

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.protocol.messages import version
from fedtar_flare.site import approval, audit, job_records
from fedtar_flare.site.accountant import Ledger, PatientLedger
from fedtar_flare.site.admission import Declined
from fedtar_flare.site.context import Site
from fedtar_flare.site.job_records import bind_run, count_answer, fix_cells, read_record
from fedtar_flare.site.state import MOST_REPEATS, SiteState
from fedtar_flare.testing import Hospital

YEAR, DIGEST = 365 * 86400, "ab" * 32
LAYOUT = {"time_steps": "2", "timeline": "visits", "min_cell": "5", "score": "test"}


def move_clock(monkeypatch, seconds):
    now, utc = time.time, time.gmtime
    monkeypatch.setattr(time, "time", lambda: now() + seconds)
    monkeypatch.setattr(time, "gmtime", lambda at=None: utc(now() + seconds if at is None else at))

    class Moved(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)

    monkeypatch.setattr(job_records, "datetime", Moved)


@pytest.mark.parametrize("moved", [-YEAR, YEAR])
def test_a_moved_clock_resets_nothing_and_nothing_is_asked_again(tmp_path, monkeypatch, moved):
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path))
    site, state = Site.outside_of_jobs(tmp_path, simulated="north"), SiteState(tmp_path / "state", "run", "north")
    header = Hospital(tmp_path, name="north").header("run", 1, 1, after="0000-00")
    records, before = tmp_path / "records", time.strftime("%Y")
    for _ in range(MOST_REPEATS):
        state.add_answered("train", version(1, 1))
    assert state.may_answer("scores", "weights")
    Ledger(records / "ledger.json").add("run", 2.0)
    PatientLedger(records / "patients.json").add("run", 1.0, 0.1, 5)
    bind_run(records, "job", "run", "")
    count_answer(records, "data", 1)
    fix_cells(records, "data", LAYOUT)
    approval.approve(records, DIGEST, "job")
    audit.write(site, "job", {"task": "train"})
    accounts = {file: file.read_bytes() for file in records.rglob("*.json")}

    move_clock(monkeypatch, moved)
    assert time.strftime("%Y", time.gmtime()) != before and approval.is_approved(records, DIGEST)
    again = SiteState(tmp_path / "state", "run", "north")
    with pytest.raises(ExchangeError):
        again.check_quota("train", header)
    assert again.may_answer("scores", "weights") and not again.may_answer("scores", "other weights")
    assert Ledger(records / "ledger.json").spent(1e-5).releases == 1
    assert PatientLedger(records / "patients.json").spent("run") > 0
    for refused in (
        lambda: count_answer(records, "data", 1),
        lambda: fix_cells(records, "data", LAYOUT | {"min_cell": "6"}),
        lambda: bind_run(records, "job", "another", ""),
    ):
        with pytest.raises((Declined, ExchangeError)):
            refused()
    assert {file: file.read_bytes() for file in records.rglob("*.json")} == accounts
    audit.write(site, "job", {"task": "train"})
    (file,) = audit.audit_files(site.records)
    assert audit.verify(file).lines == 2 and not audit.verify(file).problem
    assert read_record(records / job_records.RUNS) == {"job": "run"}
