"""The bench: ``python -m tests.benchmarks`` runs each comparison and prints one table.

    python -m tests.benchmarks [--list] [--only NAME ...] [--json FILE] [--quick] [--threads N]
    python -m tests.benchmarks --gpu [--tiny] [--json FILE]

Comparisons are functions under ``@comparison`` in the ``compare_*.py`` files beside this one. With ``--json``, results
that the file holds are not measured again.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.harness import HEAD, ROWS, Absent, Comparison, Measured, machine


def comparisons() -> dict[str, Comparison]:
    """All comparisons by name, sorted by file."""
    for file in sorted(Path(__file__).parent.glob("compare_*.py")):
        importlib.import_module(f"tests.benchmarks.{file.stem}")
    return ROWS


def main(arguments: Sequence[str] | None = None) -> int:
    known = comparisons()
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the comparisons and run none")
    parser.add_argument("--only", action="append", choices=known, metavar="NAME", help="this one; may be repeated")
    parser.add_argument("--json", type=Path, help="results, with hardware and versions; goes on where it was stopped")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, and measures nothing")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument(
        "--gpu", action="store_true", help="an update of the paper-size model on a GPU, and nothing else"
    )
    parser.add_argument("--tiny", action="store_true", help="of --gpu: on the CPU, to show that it runs")
    options = parser.parse_args(arguments)
    if options.gpu:
        from tests.benchmarks import gpu

        return gpu.main(options.tiny, options.json or Path("gpu.json"), machine(options.threads))
    if options.list:
        print(*known, sep="\n")
        return 0
    import torch

    torch.set_num_threads(options.threads)
    held: dict[str, Measured] = {}
    if options.json and options.json.is_file():
        held = json.loads(options.json.read_text(encoding="utf-8"))["results"]
    absent: dict[str, str] = {}
    about = {"machine": machine(options.threads), "quick": options.quick}
    for name in options.only or known:
        if name in held:
            continue
        try:
            held[name] = known[name].measure(options.quick)
            print(known[name].row(held[name]), file=sys.stderr, flush=True)
        except Absent as reason:
            absent[name] = str(reason)
        if options.json:
            text = json.dumps(about | {"results": held, "absent": absent}, indent=1)
            options.json.write_text(text, encoding="utf-8")
    print(HEAD, *(known[name].row(held[name]) for name in known if name in held), sep="\n")
    print("".join(f"| {name} | | | not measured: {reason} | | |\n" for name, reason in absent.items()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
