"""The doctor's look at who can reach the site's files: FLARE's administrators, the server, other users."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtar_flare.errors import ConfigError
from fedtar_flare.files import read_json
from fedtar_flare.site.doctor.finding import FAIL, OK, WARN, Finding
from fedtar_flare.site.place import STATE, state_of
from fedtar_flare.site.policy import AUTHORIZATION, RESOURCES
from fedtar_flare.site.rights import too_wide
from fedtar_flare.site.site_file import SiteConfig, cache_folder

COMPLETE = "run 'python -m fedtar_flare.provision.kit KIT' and start the site again"

_OURS = re.compile(r"fedtar_flare\..+\.SupervisedProcessLauncher$")


def rights(kit: Path) -> list[Finding]:
    """Whether some role may read the site's files through FLARE's console, or bring code."""
    content = _local(kit, AUTHORIZATION)
    try:
        found = too_wide(content) if isinstance(content, dict) else None
    except ConfigError as error:
        content, found = str(error), None
    if found is None:
        return [Finding(FAIL, "rights", str(content), COMPLETE)]
    if found:
        text = f"the authorization policy lets administrators read files or bring code ({'; '.join(found)})"
        return [Finding(FAIL, "rights", text, COMPLETE)]
    return [Finding(OK, "rights", "no administrator may read files here or bring code")]


def doors(kit: Path) -> Finding:
    """Whether the site refuses the shell whatever the server says of a request's rights."""
    content = _local(kit, RESOURCES)
    components = content.get("components") if isinstance(content, dict) else None
    entries = [entry for entry in components or [] if isinstance(entry, dict) and _OURS.match(str(entry.get("path")))]
    if not entries:
        text = f"{RESOURCES} does not have our launcher: the server can read this account's files by a shell"
        return Finding(FAIL, "shell", text, COMPLETE)
    if (entries[0].get("args") or {}).get("byoc"):
        cure = f'remove "byoc" from the args of process_launcher in {RESOURCES}, unless the site wants it so'
        return Finding(WARN, "shell", "refused, but jobs may bring code, which can do whatever this account can", cure)
    return Finding(OK, "shell", "refused, whoever asks, and so are jobs with code of their own")


def places(kit: Path, config: SiteConfig | None) -> list[Finding]:
    """Whether data, prepared images or state lie inside the kit, where FLARE's console reads text files."""
    state = (config.state_dir if config is not None else None) or state_of(kit)
    named: dict[str, Path | None] = {"state": state}
    if config is not None:
        named |= {"path": config.path, "exclude": config.exclude, "cache_dir": cache_folder(config)}
    findings = []
    for name, place in named.items():
        if place is None or not place.resolve().is_relative_to(kit.resolve()):
            continue
        if place == kit / STATE:
            target = kit.with_name(f"{kit.name}.{STATE}")
            cure = f"stop the site, 'mv {place} {target}', and start it again: nothing is lost"
        else:
            cure = f"move it out of the kit and change '{name}' in the site file"
        findings.append(Finding(FAIL, "places", f"{name} lies inside the kit ({place})", cure))
    return findings or [Finding(OK, "places", "neither data nor state lie inside the kit")]


def modes(kit: Path, config: SiteConfig | None) -> list[Finding]:
    """Whether other users of this machine can read the kit or the site's state."""
    state = (config.state_dir if config is not None else None) or state_of(kit)
    folders = [folder for folder in (kit, state) if folder.is_dir()]
    open_ = [folder for folder in folders if folder.stat().st_mode & 0o077]
    if not open_:
        return [Finding(OK, "file modes", "kit and state belong to this account alone")]
    return [
        Finding(FAIL, "file modes", f"{folder} can be read by other users of this machine", f"chmod -R go= {folder}")
        for folder in open_
    ]


def _local(kit: Path, name: str) -> dict[str, Any] | str:
    """A file of ``local/`` as FLARE takes it, or why it cannot be read."""
    for file in _candidates(kit, name):
        try:
            return read_json(file)
        except ConfigError as error:
            return str(error)
    return f"{kit / 'local'} has no {name}"


def _candidates(kit: Path, name: str) -> Iterator[Path]:
    return (file for file in (kit / "local" / name, kit / "local" / f"{name}.default") if file.is_file())
