"""Storage of the server inside its own kit, wherever the kit lies.

FLARE's own components take absolute paths, which nobody knows when kits are provisioned, so its template puts jobs and
results into the system's temporary folder. The server changes into its kit before it builds these.
"""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.impl.job_def_manager import SimpleJobDefManager
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage

from fedtar_flare.errors import ConfigError


class KitStorage(FilesystemStorage):
    """FLARE's file storage in a folder of the kit.

    Args:
        folder: below the kit, such as ``storage/snapshots``.

    Raises:
        ConfigError: for an absolute folder, or one outside of the kit.
    """

    def __init__(self, folder: str):
        self.folder = folder
        super().__init__(root_dir=str(_in_kit(folder)))


class KitJobManager(SimpleJobDefManager):
    """FLARE's job manager with its jobs and results in a folder of the kit.

    Args:
        folder: below the kit, such as ``storage/jobs``.
        job_store_id: component that stores them, with the file system's root as its own.

    Raises:
        ConfigError: for an absolute folder, or one outside of the kit.
    """

    def __init__(self, folder: str = "storage/jobs", job_store_id: str = "job_store"):
        self.folder = folder
        super().__init__(uri_root=str(_in_kit(folder)), job_store_id=job_store_id)


def _in_kit(folder: str) -> Path:
    path = Path(folder)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ConfigError(f"folder '{folder}' must be below the kit, such as 'storage/jobs'")
    return Path.cwd() / path
