"""The site file: where this site's data lies and how it computes. The site's own knowledge, never the job's."""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
import secrets
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from fedtar_flare.data.cohort import Cohort
from fedtar_flare.data.sources import READERS, read_source
from fedtar_flare.data.timeline import Timeline
from fedtar_flare.errors import ConfigError, DataError

logger = logging.getLogger(__name__)
SOURCES = ("synthetic", *READERS)
SITES_VARIABLE = "FEDTAR_SITES"
SITE_FILE = "fedtar.yaml"
KEY_FILE = "fedtar.key"


@dataclass(frozen=True)
class SiteConfig:
    """What a site file says.

    Args:
        source: ``manifest``, ``mimic_cxr``, ``ct_rate``, ``iu_xray``, ``covid_chestxray`` or ``synthetic``.
        path: the manifest, or the folder of the source.
        options: further settings of the source.
        cache_dir: folder of prepared images; default ``$FEDTAR_HOME`` or ``~/.cache/fedtar_flare``.
        state_dir: folder of the site state; None: FLARE's kit, or the cache in the simulator.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<i>``.
        precision: ``auto``, ``float32`` or ``bfloat16``.
        min_cell: fewest visits at a step to train on it and to report scores; None: the job's, 5 in production.
        exclude: text file of patient ids, one a line, that are left out (patients who withdrew).
        stream_losses: whether the loss of every local update goes to the server's TensorBoard while the site trains;
            None: only from a simulated site or a synthetic cohort.
        origin: which file this was read from (not a key of the file).
        simulated: whether the site is simulated (not a key of the file): its hash key then derives from the job's seed,
            so that a repeated simulation splits its patients alike.

    Raises:
        ConfigError: names the field, its value and what is allowed.
    """

    source: str
    path: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    cache_dir: Path | None = None
    state_dir: Path | None = None
    device: str = "auto"
    precision: str = "auto"
    min_cell: int | None = None
    exclude: Path | None = None
    stream_losses: bool | None = None
    origin: Path | None = None
    simulated: bool = False

    def __post_init__(self) -> None:
        where = f"{self.origin}: " if self.origin else ""
        if self.source not in SOURCES:
            near = difflib.get_close_matches(str(self.source), SOURCES, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"{where}source '{self.source}' is not one of {', '.join(SOURCES)}{hint}")
        if self.source != "synthetic" and self.path is None:
            raise ConfigError(f"{where}source '{self.source}' needs a path")
        if self.source != "synthetic" and self.path is not None and not self.path.exists():
            raise ConfigError(f"{where}path {self.path} is not there", public="the site's data is not at its path")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"{where}device '{self.device}' is not one of auto, cpu, cuda, cuda:<i>")
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"{where}precision '{self.precision}' is not one of auto, float32, bfloat16")
        whole = isinstance(self.min_cell, int) and not isinstance(self.min_cell, bool)
        if self.min_cell is not None and (not whole or self.min_cell < 1):
            raise ConfigError(f"{where}min_cell must be a number of at least 1, not {self.min_cell!r}")
        if self.stream_losses not in (None, True, False):
            raise ConfigError(f"{where}stream_losses must be true or false, not {self.stream_losses!r}")
        if not isinstance(self.options, dict):
            raise ConfigError(f"{where}options must be a mapping, not {self.options!r}")


def load_site_config(site_name: str, *, workspace: Path | None, simulator: bool) -> SiteConfig:
    """Find and read the site file.

    Looked for in this order: ``<site>.yaml`` in the folder that FEDTAR_SITES names, ``local/fedtar.yaml`` in the
    site's FLARE workspace. Without one, the simulator takes the synthetic cohort; any other site stops. Where
    FEDTAR_SITES is set, the simulator wants a file for every site: one misspelt name must not put phantoms among
    real hospitals.

    Args:
        site_name: name of the site.
        workspace: its FLARE workspace.
        simulator: whether the site is simulated.

    Raises:
        ConfigError: no site file outside of the simulator, unreadable, or with an unknown key or wrong value.
    """
    places = []
    folder = sites_folder()
    if folder:
        places.append(Path(folder) / f"{site_name}.yaml")
    if workspace is not None:
        places.append(workspace / "local" / SITE_FILE)
    for place in places:
        if place.is_file():
            return read_site_file(place, simulated=simulator)
    if simulator and folder:
        there = ", ".join(sorted(file.name for file in Path(folder).glob("*.yaml"))) or "none"
        raise ConfigError(
            f"site {site_name}: {SITES_VARIABLE} names {folder}, which has no {site_name}.yaml (there: {there}). "
            f"Write it ('source: synthetic' for phantoms), or unset {SITES_VARIABLE}",
            public=f"the site has no file in the folder that {SITES_VARIABLE} names",
        )
    if simulator:
        return SiteConfig(source="synthetic", simulated=True)
    raise ConfigError(
        f"site {site_name} has no site file, and synthetic data is used only in the simulator or where a site file "
        f"asks for it. Write {places[-1] if places else SITE_FILE} with at least 'source: manifest' and 'path: <your "
        "manifest>' (or 'source: synthetic' for a trial)",
        public="the site has no site file (local/fedtar.yaml)",
    )


def sites_folder() -> Path | None:
    """The folder that FEDTAR_SITES names; None where it is not set.

    A relative one is relative to where the command was started: the simulator starts its sites in folders of their own.
    """
    named = os.environ.get(SITES_VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser()
    started = Path(os.environ.get("PWD", ".")) / folder
    return folder if folder.is_dir() or not started.is_dir() else started


def read_site_file(place: Path, simulated: bool = False) -> SiteConfig:
    """Read one site file; relative paths in it are relative to its folder.

    Raises:
        ConfigError: names the file, the key and the nearest known one.
    """
    try:
        content = yaml.safe_load(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{place}: not readable as YAML ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: must hold 'key: value' lines, at least 'source: ...'")
    known = [f.name for f in fields(SiteConfig) if f.name not in ("origin", "simulated")]
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"{place}: unknown key '{key}'{hint} (known: {', '.join(known)})")
    if "source" not in content:
        raise ConfigError(f"{place}: 'source' is missing; one of {', '.join(SOURCES)}")
    for key in ("path", "cache_dir", "state_dir", "exclude"):
        if content.get(key) is not None:
            content[key] = place.parent / Path(str(content[key])).expanduser()
    content = {key: value for key, value in content.items() if value is not None}
    return SiteConfig(**content, origin=place, simulated=simulated)


def load_cohort(
    config: SiteConfig,
    site_name: str,
    *,
    timeline: Timeline,
    seed: int = 0,
    synthetic_patients: int = 48,
    workspace: Path | None = None,
) -> Cohort:
    """The site's patients, without those it excludes.

    Args:
        config: the site file.
        site_name: name of the site.
        timeline: how visits become time steps.
        seed: of the synthetic cohort, and of the hash key of any simulated site.
        synthetic_patients: of the synthetic cohort.
        workspace: the site's FLARE workspace, where a real site keeps its hash key.

    Raises:
        DataError: nothing can be used.
        ConfigError: a setting is wrong.
    """
    if config.source == "synthetic":
        cohort = _synthetic(config, site_name, synthetic_patients, timeline, seed)
    else:
        assert config.path is not None  # a SiteConfig of these sources has one
        reading = read_source(config.source, config.path, config.options)
        patients = reading.patients()
        cohort = Cohort(
            site_name,
            patients,
            key=derived_key(seed, site_name) if config.simulated else site_key(_key_folder(config, workspace)),
            timeline=timeline,
            rejected=reading.rejected(),
        )
    excluded = excluded_patients(config)
    absent = len(excluded - {patient.patient_id for patient in cohort.patients})
    if absent:
        logger.warning("%d id(s) of the exclusion list %s are no patients of this site", absent, config.exclude)
    return cohort.leaving_out(lambda v: "excluded" if v.patient_id in excluded else None) if excluded else cohort


def _synthetic(config: SiteConfig, site_name: str, patients: int, timeline: Timeline, seed: int) -> Cohort:
    from fedtar_flare.data.sources.reading import check_options
    from fedtar_flare.synthetic.cohort import CohortOptions, synthetic_cohort

    check_options(config.options, [f.name for f in fields(CohortOptions)], "synthetic")
    try:
        options = CohortOptions(**config.options)
    except TypeError as error:
        raise ConfigError(f"{config.origin}: an option of the synthetic cohort has the wrong type ({error})") from error
    return synthetic_cohort(
        site_name,
        folder=config.path or cache_folder(config) / "synthetic",
        patients=patients,
        timeline=timeline,
        seed=seed,
        options=options,
    )


def _key_folder(config: SiteConfig, workspace: Path | None) -> Path:
    """Where a real site keeps its key: with its state, else in its kit, else beside its site file."""
    if config.state_dir is not None:
        return config.state_dir
    if workspace is not None:
        return workspace / "local"
    return config.origin.parent if config.origin is not None else cache_folder(config)


def cache_folder(config: SiteConfig) -> Path:
    """Where prepared images and the synthetic cohort lie."""
    return config.cache_dir or Path(os.environ.get("FEDTAR_HOME") or Path.home() / ".cache" / "fedtar_flare")


def excluded_patients(config: SiteConfig) -> frozenset[str]:
    """Patient ids of the exclusion list.

    Raises:
        ConfigError: the list is named but cannot be read; nothing is trained then, rather than with those patients.
    """
    if config.exclude is None:
        return frozenset()
    try:
        lines = config.exclude.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{config.exclude}: the exclusion list cannot be read ({error})",
            public="the site's exclusion list cannot be read",
        ) from error
    return frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def site_key(folder: Path) -> bytes:
    """The site's secret for keyed hashes: made once, readable by its owner alone. Back it up: splits depend on it.

    Raises:
        DataError: the file is there but is not a key.
    """
    file = folder / KEY_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{KEY_FILE}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as handle:
            handle.write(secrets.token_hex(32) + "\n")
        try:
            os.link(temporary, file)  # fails when another process was first: its key counts
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return read_key(file)


def read_key(file: Path) -> bytes:
    """A site's key from its file.

    Raises:
        DataError: the file cannot be read, or is not a key.
    """
    try:
        key = bytes.fromhex(file.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})", reason="bad-key") from error
    except ValueError as error:
        raise DataError(f"{file} is not a key of this package; restore it from its backup", reason="bad-key") from error
    if len(key) < 16:
        raise DataError(f"{file} is too short to be a key; restore it from its backup", reason="bad-key")
    return key


def derived_key(seed: int, site: str) -> bytes:
    """Key of a simulated site with real data, a function of the job's seed and the site's name."""
    return hashlib.sha256(f"fedtar simulated site\x1f{seed}\x1f{site}".encode()).digest()
