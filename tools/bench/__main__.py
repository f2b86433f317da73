"""The bench: ``python -m tools.bench`` compares this package with rivals, a row for each comparison.

python -m tools.bench [--only NAME ...] [--json FILE] [--quick]
python -m tools.bench --gpu [--tiny] [--json FILE]
"""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("fedtar_flare", "torch", "transformers", "peft", "nvflare", "monai", "scikit-learn", "numpy")


def machine() -> dict[str, Any]:
    """The hardware, the load before, the date and the versions."""
    file = Path("/proc/cpuinfo")
    processor = re.search(r"model name\s*:\s*(.+)", file.read_text() if file.exists() else "")
    return {
        "processor": processor[1] if processor else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_before": os.getloadavg()[0],
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version()} | {package: version(package) for package in PACKAGES},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command (see the head of this file)."""
    from tools.bench import cpu, gpu

    known = cpu.comparisons()
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=known, help="measure this comparison; may be repeated")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="results, with hardware and versions")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, and measures nothing")
    parser.add_argument("--gpu", action="store_true", help="an update of the paper-size model on a GPU, nothing else")
    parser.add_argument("--tiny", action="store_true", help="of --gpu: on the CPU, to show that it runs")
    options = parser.parse_args(arguments)
    if options.gpu:
        return gpu.main(options.tiny, options.json, machine())
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    print(cpu.HEAD)
    for name in options.only or known:
        results[name] = known[name].measure(options.quick)
        print(known[name].row(results[name]), flush=True)
        content = {"machine": machine(), "quick": options.quick, "results": results}
        options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
