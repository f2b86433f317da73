"""Adapter folders on the Hugging Face hub: found by their id, and uploaded."""

import re
import stat
from pathlib import Path

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.text import plain
from fedtar_flare.models.adapters.peft_file import ADAPTER_FILES, read_adapter_info
from fedtar_flare.models.sources import hub_access

MANIFEST = "release.json"
FILES = [*ADAPTER_FILES, "README.md", MANIFEST]
"""All that leaves for the hub or comes from it: a patient adapter and a site's state have other names."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def adapter_folder(name: Path | str, online: bool = False) -> Path:
    """Return a local folder as it is; of a hub id, ``owner/name`` or ``owner/name@revision``, the folder in its cache.

    ``online``: the hub is asked, and what the cache lacks is fetched. ConfigError where there is neither.
    """
    hub_id, _, revision = str(name).partition("@")
    if (folder := Path(name)).exists() or not HUB_ID.fullmatch(hub_id):
        return folder
    from huggingface_hub import snapshot_download

    try:
        with hub_access(online):
            revised = revision or None
            return Path(snapshot_download(hub_id, revision=revised, allow_patterns=FILES, local_files_only=not online))
    except Exception as error:  # of a hub that cannot be reached or refuses, the library raises anything
        reason = plain(error) if online else "fetch it with --online, or `hf download` where there is a network"
        text = f"{name}: no such folder, and no adapter that the hub's cache here has under this id"
        raise ConfigError(f"{text}: {reason}") from error


def files_to_push(folder: Path) -> dict[str, int]:
    """Bytes of each file of an adapter folder, by name; ConfigError where it holds anything else or a link."""
    read_adapter_info(folder)
    names = sorted(path.name for path in folder.iterdir())
    if other := [name for name in names if name not in FILES]:
        raise ConfigError(f"{folder} holds more than an adapter ({', '.join(other)}): move that elsewhere")
    if leads := [name for name in names if not stat.S_ISREG((folder / name).lstat().st_mode)]:
        raise ConfigError(f"{folder}: {', '.join(leads)} is no regular file but leads elsewhere: put a copy there")
    return {name: (folder / name).stat().st_size for name in names}


def push(folder: Path, hub_id: str) -> str:
    """Upload :func:`files_to_push` in one commit, in place of an earlier adapter; return its address."""
    from huggingface_hub import HfApi

    try:
        with hub_access(True):
            api = HfApi()
            api.create_repo(hub_id, private=True, exist_ok=True)
            return str(
                api.upload_folder(repo_id=hub_id, folder_path=folder, allow_patterns=FILES, delete_patterns=FILES)
            )
    except Exception as error:
        raise FedTARError(f"{hub_id}: not uploaded ({plain(error)})") from error
