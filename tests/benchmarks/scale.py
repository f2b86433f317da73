"""Scale: ``python -m tests.benchmarks.scale`` measures time and memory against what grows, and draws a chart of each.

    python -m tests.benchmarks.scale --json FILE [--charts FOLDER] [--only AXIS ...] [--repeat N] [--quick]

Each point is measured in a process of its own, ``--repeat`` times; results that the file holds are not measured
again. Tables are printed. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.benchmarks.__main__ import machine
from tests.benchmarks.scale_charts import AXES, draw_charts, tables

Found = dict[str, float]
Measure = Callable[[Any, Path, bool], Found]
STEPS = 3
"""Time steps of the server's run."""
QUICK = {"updates": 2, "warm": False}
"""Settings of a hospital with ``--quick``."""


@dataclass(frozen=True)
class Points:
    """Where an axis is measured.

    Args:
        values, quick: places, by default and with ``--quick``.
        measure: what is found at one of them, in an empty folder; the last argument is whether it is quick.
    """

    values: Sequence[Any]
    quick: Sequence[Any]
    measure: Measure


def apart(work: Callable[..., Found], *arguments: Any) -> Found:
    """``work(*arguments)`` in a process of its own, a copy of this one, which has the imports and has computed nothing.

    Raises BrokenProcessPool where it ended without an answer (too little memory).
    """
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def _site(**settings: Any) -> Callable[[Any, Path, bool], Found]:
    """A measurement of one hospital; settings that are functions get the place on the axis."""

    def measure(value: Any, folder: Path, quick: bool) -> Found:
        from fedtar_flare.models.libraries import load_libraries
        from tests.benchmarks.scale_cohort import Hospital
        from tests.benchmarks.scale_site import opening, round_of

        load_libraries()
        chosen = {name: made(value) if callable(made) else made for name, made in settings.items()}
        size = Hospital(**chosen | (QUICK if quick else {}))
        first = apart(opening, size, folder)
        return first | apart(round_of, size, folder)

    return measure


def _server(value: int, folder: Path, quick: bool) -> Found:
    from tests.benchmarks.scale_server import controller

    return apart(controller, value, 1 if quick else STEPS, folder)


POINTS: Mapping[str, Points] = {
    "patients": Points((50, 200, 800, 3200), (30, 40), _site(patients=int, visits=2)),
    "visits": Points((1, 2, 4, 8), (1,), _site(patients=200, visits=int)),
    "rank": Points((1, 2, 4, 8, 16, 32), (2,), _site(patients=48, rank=int, model="small", scored=False)),
    "model": Points(
        ("tiny, both", "small, both", "decoder of 256", "decoder of 512", "cvt-21 and distilgpt2"),
        ("tiny, both",),
        _site(patients=48, model=str, updates=4, scored=False),
    ),
    "sites": Points((10, 50, 100, 250, 500), (2, 4), _server),
}


def _load(file: Path | None) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(AXES), help="this axis alone; may be repeated")
    parser.add_argument("--json", type=Path, help="results, with hardware and versions; goes on where it was stopped")
    parser.add_argument("--charts", type=Path, help="folder of the charts, scale-<axis>.svg")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each point (default 3)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, once: shows that it runs, measures nothing")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        parser.error("memory is read from Linux' /proc, which is not here")
    os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch are imported
    stored = _load(options.json)
    found: dict[str, dict[str, list[Found]]] = stored.get("measured", {})
    about = {"machine": stored.get("machine") or machine(1), "quick": options.quick}
    for turn in range(1 if options.quick else options.repeat):
        for axis in options.only or AXES:
            points = POINTS[axis]
            for value in points.quick if options.quick else points.values:
                measured = found.setdefault(axis, {}).setdefault(str(value), [])
                if len(measured) > turn:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    measured.append(points.measure(value, Path(folder), options.quick))
                print(f"{axis} {value}: {len(measured)}", file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(about | {"measured": found}, indent=1), encoding="utf-8")
    print(tables(found))
    if options.charts:
        draw_charts(found, options.charts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
