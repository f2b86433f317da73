"""The doctor's look at packages, GPU, site file, data, key and disks."""

import ctypes
import platform
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.site.cohort import KEY_FILE, key_folder, load_cohort
from fedtar_flare.site.context import Site, home
from fedtar_flare.site.doctor import FAIL, OK, WARN, Finding
from fedtar_flare.site.site_file import SiteConfig, cache_folder, read_site_file, state_folder
from fedtar_flare.version import __version__

A_RUN = 1_000_000_000
"""Bytes of state that a run may need: six versions of a private part and a round's broadcasts, at a large preset."""
ROOM, LEAST = 10.0, 1.0
"""Free space in GB: below the first a warning, below the second a failure."""


def packages() -> list[Finding]:
    """Whether every required package is there in a supported version."""
    here = f"fedtar_flare {__version__}, Python {platform.python_version()} ({sys.executable})"
    wrong, right = [], []
    for requirement in map(Requirement, requires("fedtar_flare") or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing (wanted {requirement.specifier})")
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            right.append(f"{requirement.name} {installed}")
        else:
            wrong.append(f"{requirement.name} {installed} (wanted {requirement.specifier})")
    cure = "pip install fedtar_flare again in this environment, in a fresh one if other packages need other versions"
    findings = [Finding(FAIL, "packages", text, cure) for text in wrong]
    return [Finding(OK, "environment", here), *findings, Finding(OK, "packages", ", ".join(right))]


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
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices]


def _has_driver() -> bool:
    """Whether a GPU's driver is there at all: where none is, torch, which takes seconds to import, has none to find."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError):
            ctypes.CDLL(library)
            return True
    return Path("/dev/kfd").exists()  # AMD


def site_file(file: Path) -> tuple[SiteConfig | None, list[Finding]]:
    """Whether the site file is there and valid."""
    if not file.is_file():
        cure = f"write it with 'fedtar init -o {file}', and enter 'source' and 'path'"
        return None, [Finding(FAIL, "site file", f"{file} is not there", cure)]
    try:
        config = read_site_file(file)
    except FedTARError as error:
        return None, [Finding(FAIL, "site file", str(error), "correct the file")]
    if config.source == "synthetic":
        cure = "name the hospital's own data with 'source' and 'path', unless this is a trial"
        return config, [Finding(WARN, "site file", f"{file}: synthetic data, no patient of this site", cure)]
    return config, [Finding(OK, "site file", f"{file}: {config.source} {config.path}")]


def data(config: SiteConfig, time_steps: int) -> tuple[int, list[Finding]]:
    """How many studies there are; patients, visits per time step, and what is left out. No image is opened."""
    if config.source == "synthetic":
        return 0, []
    try:
        # as a simulated site: no key is made for this
        cohort = load_cohort(config.replace(simulated=True), "site", timeline=Timeline(time_steps))
    except FedTARError as error:
        return 0, [Finding(FAIL, "data", str(error), "correct the table; 'fedtar data check' looks at every study")]
    steps = [sum(counts) for counts in zip(*cohort.counts().values(), strict=True)]
    text = f"{len(cohort.patients)} patients, visits at time steps 1 to {time_steps}: {', '.join(map(str, steps))}"
    findings = [Finding(OK, "data", text)]
    if not all(steps):
        cure = "normal for a young cohort: the site has nothing to add at these steps"
        findings = [Finding(WARN, "data", f"{text}; some steps have none", cure)]
    if cohort.rejected:
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(cohort.rejected.items()))
        cure = "'fedtar data check' names every study that is left out"
        findings.append(Finding(WARN, "data", f"left out: {left}", cure))
    return len(cohort.visits), findings


def key(kit: Path, config: SiteConfig | None) -> list[Finding]:
    """Whether the secret of the keyed hashes is readable by its owner alone, and a reminder to back it up."""
    file = key_folder(config, kit) / KEY_FILE
    if not file.is_file() and config is not None and config.source == "synthetic":
        return [Finding(OK, "key", "synthetic data needs none")]
    if not file.is_file():
        return [Finding(OK, "key", f"{file} is made by the first run; back it up then")]
    cure = "copy it to a safe place inside the hospital: without it, patients change between training and test"
    findings = [Finding(WARN, "key", f"{file}: no copy of it is known here", cure)]
    if file.stat().st_mode & 0o077:
        findings.append(Finding(FAIL, "key", f"{file} can be read by others", f"chmod 600 {file}"))
    return findings


def disks(kit: Path | None, config: SiteConfig | None, studies: int) -> list[Finding]:
    """Free space where state and prepared images lie, against what so many studies and one more run need."""
    from fedtar_flare.models.config import PRESETS, preset

    cache, state = cache_folder(config) if config else home(), state_folder(kit, config)
    largest = max(3 * model.slices * model.image_size**2 for model in map(preset, PRESETS))
    needed = max(0, studies * largest - _size(cache / "prepared", "*.npy"))
    findings = [_disk("cache", cache, needed, "to prepare all studies at the largest preset")]
    if state:
        runs = [_size(folder) for folder in state.iterdir() if folder.is_dir()] if state.is_dir() else []
        findings.append(_disk("state", state, max([A_RUN, *runs]), "for one more run like the largest here"))
    return findings


def retention(kit: Path, config: SiteConfig) -> Finding:
    """How much state of runs there is, and in how many days which part of it goes."""
    from fedtar_flare.site.purge import summary

    try:
        root = Site.outside_of_jobs(kit).state_root(config.state_dir)
        return Finding(OK, "retention", summary(root, config.retention_days))
    except FedTARError as error:
        return Finding(WARN, "retention", str(error), "restore the file, or delete the run with 'fedtar site purge'")


def _size(folder: Path, names: str = "*") -> int:
    return sum(file.stat().st_size for file in folder.rglob(names) if file.is_file())


def _disk(name: str, folder: Path, needed: int, use: str) -> Finding:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    status = FAIL if free < max(LEAST, needed / 1e9) else WARN if free < ROOM else OK
    cure = f"free the disk ('fedtar site purge --cache'), or write {name}_dir into the site file"
    text = f"{free:.1f} GB free for the {name} ({folder}); about {needed / 1e9:.1f} GB are needed {use}"
    return Finding(status, "disk space", text, "" if status == OK else cure)
