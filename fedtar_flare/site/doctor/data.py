"""The doctor's look at the site file, its data and the key."""

from __future__ import annotations

import stat
from pathlib import Path

from fedtar_flare.data.timeline import Timeline
from fedtar_flare.errors import FedTARError
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.site.doctor.finding import FAIL, OK, WARN, Finding
from fedtar_flare.site.key import KEY_FILE
from fedtar_flare.site.site_file import SiteConfig, read_site_file


def site_file(place: Path) -> tuple[SiteConfig | None, list[Finding]]:
    """Whether the site file is there and valid."""
    if not place.is_file():
        cure = "write it with at least 'source: manifest' and 'path: <your manifest>'"
        return None, [Finding(FAIL, "site file", f"{place} is not there", cure)]
    try:
        config = read_site_file(place)
    except FedTARError as error:
        return None, [Finding(FAIL, "site file", str(error), "correct the file")]
    if config.source == "synthetic":
        cure = "name the hospital's own data with 'source' and 'path', unless this is a trial"
        return config, [Finding(WARN, "site file", f"{place}: synthetic data, no patient of this site", cure)]
    return config, [Finding(OK, "site file", f"{place}: {config.source} {config.path}")]


def summary(config: SiteConfig, time_steps: int) -> list[Finding]:
    """Patients and visits per time step, and what is left out; no image is opened."""
    if config.source == "synthetic":
        return []
    try:
        # as a simulated site: no key is made for this
        cohort = load_cohort(config.replace(simulated=True), "site", timeline=Timeline(time_steps))
    except FedTARError as error:
        return [Finding(FAIL, "data", str(error), "correct the table; 'fedtar data check' looks at every study")]
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
    return findings


def studies(config: SiteConfig) -> int:
    """How many studies there are to prepare; 0 where that cannot be read or nobody is behind them."""
    if config.source == "synthetic":
        return 0
    try:
        return len(load_cohort(config.replace(simulated=True), "site", timeline=Timeline(1)).visits)
    except FedTARError:
        return 0


def key(kit: Path, config: SiteConfig | None) -> list[Finding]:
    """Whether the secret of the keyed hashes is readable by its owner alone, and a reminder to back it up."""
    file = (config.state_dir if config is not None and config.state_dir is not None else kit / "local") / KEY_FILE
    if not file.is_file():
        return [Finding(OK, "key", f"{file} is made by the first run; back it up then")]
    cure = "copy it to a safe place inside the hospital: without it, patients change between training and test"
    findings = [Finding(WARN, "key", f"{file}: no copy of it is known here", cure)]
    if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        findings.append(Finding(FAIL, "key", f"{file} can be read by others", f"chmod 600 {file}"))
    return findings
