"""The doctor's look at Python, packages, GPU and disks."""

from __future__ import annotations

import ctypes
import platform
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from fedtar_flare.site.doctor.finding import FAIL, OK, WARN, Finding
from fedtar_flare.site.place import home, state_of
from fedtar_flare.site.site_file import SiteConfig, cache_folder
from fedtar_flare.version import __version__

A_RUN = 1_000_000_000
"""Bytes of state that a run may need: six versions of a private part and a round's broadcasts, at a large preset."""
ROOM, LEAST = 10.0, 1.0
"""Free space in GB: below the first a warning, below the second a failure."""


def packages() -> list[Finding]:
    """Whether every required package is there in a supported version."""
    here = f"fedtar_flare {__version__}, Python {platform.python_version()} ({sys.executable})"
    findings = [Finding(OK, "environment", here)]
    wrong, right = [], []
    for text in requires("fedtar_flare") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing (wanted {requirement.specifier})")
            continue
        if requirement.specifier.contains(found, prereleases=True):
            right.append(f"{requirement.name} {found}")
        else:
            wrong.append(f"{requirement.name} {found} (wanted {requirement.specifier})")
    cure = "pip install fedtar_flare again in this environment, in a fresh one if other packages need other versions"
    findings += [Finding(FAIL, "packages", text, cure) for text in wrong]
    return [*findings, Finding(OK, "packages", ", ".join(right))]


def gpu(config: SiteConfig | None = None) -> Finding:
    """Which GPU; none is fine, unless the site file asks for one."""
    devices = _devices() if _has_driver() else []
    if not devices:
        if config is not None and config.device.startswith("cuda"):
            cure = "write device: auto, or mend the driver (nvidia-smi) and install a torch with CUDA"
            return Finding(FAIL, "GPU", f"none is usable, and the site file says device: {config.device}", cure)
        return Finding(OK, "GPU", "none: training runs on the CPU")
    if config is not None and config.device != "cpu" and config.processes > len(devices):
        text = f"the site file says processes: {config.processes}, one on each GPU; here: {', '.join(devices)}"
        return Finding(FAIL, "GPU", text, f"write processes: {len(devices)}, or mend the driver (nvidia-smi)")
    return Finding(OK, "GPU", ", ".join(devices))


def _devices() -> list[str]:
    """Name and memory of each GPU that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in found]


def _has_driver() -> bool:
    """Whether a GPU's driver is there at all: where none is, torch, which takes seconds to import, has none to find."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError):
            ctypes.CDLL(library)
            return True
    return Path("/dev/kfd").exists()  # AMD


def disks(kit: Path | None, config: SiteConfig | None, studies: int = 0) -> list[Finding]:
    """Free space where state and prepared images lie, against what so many studies and one more run need."""
    from fedtar_flare.models.config import PRESETS, preset

    cache = cache_folder(config) if config else home()
    largest = max(3 * model.slices * model.image_size**2 for model in map(preset, PRESETS))
    needs = [("cache", cache, max(0, studies * largest - _size(cache / "prepared", "*.npy")))]
    state = config.state_dir if config is not None and config.state_dir is not None else kit and state_of(kit)
    if state:
        runs = [_size(folder) for folder in state.iterdir() if folder.is_dir()] if state.is_dir() else []
        needs.append(("state", state, max([A_RUN, *runs])))
    return [_disk(*need) for need in needs]


def _size(folder: Path, names: str = "*") -> int:
    return sum(file.stat().st_size for file in folder.rglob(names) if file.is_file())


def _disk(name: str, folder: Path, needed: int) -> Finding:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free / 1e9
    status = FAIL if free < max(LEAST, needed / 1e9) else WARN if free < ROOM else OK
    key = f"{name}_dir"
    cure = "" if status == OK else f"free the disk ('fedtar site purge --cache'), or write {key} into the site file"
    use = (
        "to prepare all studies at the largest preset" if name == "cache" else "for one more run like the largest here"
    )
    text = f"{free:.1f} GB free for the {name} ({folder}); about {needed / 1e9:.1f} GB are needed {use}"
    return Finding(status, "disk space", text, cure)
