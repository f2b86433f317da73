"""The hospitals of a run: their site files for the time of it, and their patients."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.site.site_file import SITES_VARIABLE, SiteConfig, load_site_config, sites_folder
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.variants import LORA_RANK, Variant


@contextmanager
def described(variant: Variant, folder: Path) -> Iterator[None]:
    """Site files of the variant's synthetic hospitals, in force within the context; none where it says nothing of them.

    :class:`ConfigError` where FEDTAR_SITES names others.
    """
    if not variant.cohort:
        yield
        return
    if (named := sites_folder()) is not None:
        raise ConfigError(f"the suite describes synthetic hospitals; unset {SITES_VARIABLE}, which names {named}")
    for site, said in variant.cohort.items():
        options = dict(said)
        rank = {LORA_RANK: options.pop(LORA_RANK)} if LORA_RANK in said else {}
        write_text(folder / f"{site}.yaml", yaml.safe_dump({"source": "synthetic", "options": options} | rank))
    os.environ[SITES_VARIABLE] = str(folder.resolve())
    try:
        yield
    finally:
        del os.environ[SITES_VARIABLE]


def require_hospitals(suite: Suite) -> None:
    """Raise :class:`ConfigError` before anything runs where a hospital's site file or its data is not there."""
    if suite.needs_site_files and sites_folder() is None:
        names = ", ".join((*suite.sites, *suite.outside))
        raise ConfigError(
            f"suite '{suite.name}' needs data of its own: make site files for {names} (fedtar data partition), and set "
            f"{SITES_VARIABLE} to their folder"
        )
    for site in (*suite.sites, *suite.outside):
        config = site_config(site)
        if suite.needs_site_files and config.source == "synthetic":
            raise ConfigError(f"{config.origin}: suite '{suite.name}' compares on real data, not on phantoms")


def site_config(site: str) -> SiteConfig:
    """A simulated site's configuration."""
    return load_site_config(site, workspace=None, simulator=True)
