"""Storage of the server inside its own kit, and an end to jobs that a killed server left running.

FLARE's own components take absolute paths, unknown at provisioning, so its template uses the system's temporary folder.
The server changes into its kit before it builds these components.
"""

from __future__ import annotations

import logging
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.job_def_manager import SimpleJobDefManager
from nvflare.apis.job_def import RunStatus
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage

from fedtar_flare.errors import ConfigError

logger = logging.getLogger(__name__)


class KitStorage(FilesystemStorage):
    """FLARE's file storage in a folder below the kit. Raises ConfigError for an absolute folder or one outside it."""

    def __init__(self, folder: str):
        self.folder = folder
        super().__init__(root_dir=str(_in_kit(folder)))


class KitJobManager(SimpleJobDefManager):
    """FLARE's job manager with its jobs and results in a folder below the kit. Raises ConfigError for any other folder.

    When a server that was killed with a job running starts again, FLARE leaves the job at RUNNING for ever and refuses
    downloads of its files. Here the job becomes ``FINISHED:ABNORMAL`` and can be resumed.
    """

    def __init__(self, folder: str = "storage/jobs", job_store_id: str = "job_store"):
        self.folder = folder
        super().__init__(uri_root=str(_in_kit(folder)), job_store_id=job_store_id)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """When the server starts: end the jobs that it had left at RUNNING."""
        if event_type != EventType.SYSTEM_BOOTSTRAP:
            return
        for job in self.get_jobs_by_status([RunStatus.RUNNING, RunStatus.DISPATCHED], fl_ctx):
            self.set_status(job.job_id, RunStatus.FINISHED_ABNORMAL, fl_ctx)
            logger.warning(
                "job %s was running when this server went down: it has ended ('fedtar resume' goes on with it)",
                job.job_id,
            )


def _in_kit(folder: str) -> Path:
    path = Path(folder)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ConfigError(f"folder '{folder}' must be below the kit, such as 'storage/jobs'")
    return Path.cwd() / path
