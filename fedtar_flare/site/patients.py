"""A site's patients outside a run, split exactly as in its runs: whoever tests there must not be learned from here."""

from __future__ import annotations

from pathlib import Path

from fedtar_flare.data.cohort import Cohort
from fedtar_flare.data.timeline import Timeline
from fedtar_flare.errors import ConfigError
from fedtar_flare.files import read_yaml
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.site.key import KEY_FILE, derived_key, read_key
from fedtar_flare.site.place import kit_of
from fedtar_flare.site.site_file import SiteConfig, read_site_file

_NAME_IT = (
    "name the key file of the real site with --key (local/fedtar.key in its startup kit), or the seed of the "
    "simulated jobs with --job-seed"
)


def patients_of_site_file(
    file: Path, *, job_seed: int | None = None, key: Path | None = None
) -> tuple[Cohort, SiteConfig]:
    """Patients of a site file, split with the key that its site has in a run; all at one time step.

    A real site's key is in its startup kit, where ``file`` lies too, in the file's ``state_dir``, or in ``key``. A
    simulated site's derives from its name, which is the file's, and the seed of the job.

    Raises:
        ConfigError: the key cannot be known, or ``job_seed`` or ``key`` do not go with this site.
        DataError: the key file or the data cannot be used.
    """
    timeline = Timeline(1)
    if job_seed is not None:
        if _kit(file) is not None or key is not None:
            raise ConfigError(f"{file}: --job-seed is for a simulated site, which has neither startup kit nor --key")
        config = read_site_file(file, simulated=True)
        return load_cohort(config, file.stem, timeline=timeline, seed=job_seed), config
    config = read_site_file(file)
    if config.source == "synthetic":
        raise ConfigError(f"{file}: patients of a synthetic cohort are split by the seed of the job: give --job-seed")
    kit = _kit(file)
    if key is not None:
        return load_cohort(config, file.stem, timeline=timeline, key=read_key(key)), config
    if kit is None and not (config.state_dir and (config.state_dir / KEY_FILE).is_file()):
        raise ConfigError(f"{file} does not say which patients its site tests on: {_NAME_IT}")
    return load_cohort(config, file.stem, timeline=timeline, workspace=kit), config


def patients_of_manifest(
    manifest: Path, *, job_seed: int | None = None, key: Path | None = None, no_site: bool = False
) -> tuple[Cohort, SiteConfig]:
    """Patients of a manifest, split with the key of the site that it belongs to; all at one time step.

    With ``job_seed``, the site is the one in ``../sites/<site>.yaml`` that names this manifest, as ``fedtar data
    synth`` and ``partition`` write them. ``no_site`` says that the manifest belongs to no site of any run.

    Raises:
        ConfigError: the key cannot be known, or more than one of the three is given.
        DataError: the key file or the data cannot be used.
    """
    if sum((job_seed is not None, key is not None, no_site)) > 1:
        raise ConfigError(f"{manifest}: only one of --job-seed, --key and --no-site decides about the split")
    if job_seed is not None:
        return patients_of_site_file(_site_file_of(manifest), job_seed=job_seed)
    config = SiteConfig(source="manifest", path=manifest)
    if key is None and not no_site:
        raise ConfigError(
            f"{manifest} does not say which patients its site tests on: {_NAME_IT}; a collection that belongs to no "
            "site of any run takes --no-site"
        )
    secret = read_key(key) if key is not None else derived_key(0, "no site")
    return load_cohort(config, manifest.stem, timeline=Timeline(1), key=secret), config


def _kit(file: Path) -> Path | None:
    """The startup kit whose ``local`` folder the site file lies in; None for any other file."""
    folder = file.expanduser().resolve().parent
    try:
        return kit_of(folder) if folder.name == "local" else None
    except ConfigError:
        return None


def _site_file_of(manifest: Path) -> Path:
    """The simulated site's file beside this manifest's folder."""
    sites = manifest.resolve().parent.parent / "sites"
    found = [
        file
        for file in sorted(sites.glob("*.yaml"))
        if (path := read_yaml(file, "'key: value' lines").get("path"))
        and (file.parent / str(path)).resolve() == manifest.resolve()
    ]
    if len(found) != 1:
        raise ConfigError(
            f"{manifest}: {len(found)} files in {sites} name this manifest, so its site's name is not known; give the "
            "site file itself with --site-file"
        )
    return found[0]
