"""The bench: ``python -m tests.benchmarks`` runs each comparison and prints one table.

    python -m tests.benchmarks [--list] [--only NAME ...] [--json FILE] [--table FILE] [--quick] [--threads N]

Comparisons are functions ``run(quick) -> Result`` in the ``compare_*.py`` files beside this one, by name in their
``COMPARISONS``. With ``--json``, results that the file holds are not measured again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.benchmarks.result import Absent, Result, table

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "transformers", "peft", "nvflare", "monai", "scikit-learn", "numpy", "pycocoevalcap")


def comparisons() -> dict[str, Callable[[bool], Result]]:
    """All comparisons by name, sorted by file."""
    found: dict[str, Callable[[bool], Result]] = {}
    for file in sorted(HERE.glob("compare_*.py")):
        found |= importlib.import_module(f"tests.benchmarks.{file.stem}").COMPARISONS
    return found


def machine(threads: int) -> dict[str, Any]:
    """What it ran on."""
    import psutil
    import torch

    from fedtar_flare.version import __version__

    versions = {"fedtar_flare": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads,
        "load_before": os.getloadavg()[0],
        "date": date.today().isoformat(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the comparisons and run none")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this one alone; may be repeated")
    parser.add_argument("--json", type=Path, help="results, with hardware and versions; goes on where it was stopped")
    parser.add_argument("--table", type=Path, help="also write the table to this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, and measures nothing")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    options = parser.parse_args(arguments)
    known = comparisons()
    if unknown := sorted(set(options.only) - set(known)):
        parser.error(f"--only {unknown[0]}: the comparisons are {', '.join(known)}")
    if options.list:
        print(*known, sep="\n")
        return 0
    import torch

    torch.set_num_threads(options.threads)
    stored: dict[str, Any] = {}
    if options.json and options.json.is_file():
        stored = json.loads(options.json.read_text(encoding="utf-8"))
    held = {name: Result.from_dict(one) for name, one in stored.get("results", {}).items()}
    absent: dict[str, str] = {}
    stored = {"machine": machine(options.threads)}
    for name, run in known.items():
        if name in held or (options.only and name not in options.only):
            continue
        try:
            held[name] = run(options.quick)
        except Absent as reason:
            absent[name] = str(reason)
        print(table([held[name]] if name in held else [], absent).splitlines()[-1], file=sys.stderr, flush=True)
        if options.json:
            results = {name: held[name].to_dict() for name in known if name in held}
            text = json.dumps(stored | {"quick": options.quick, "results": results, "absent": absent}, indent=1)
            options.json.write_text(text, encoding="utf-8")
    text = table([held[name] for name in known if name in held], absent)
    print(text)
    if options.table:
        options.table.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
