"""Storage of the server inside its own kit, an end to jobs that a killed server left running, and sites' certificates.

FLARE's own components take absolute paths, unknown at provisioning, so its template uses the system's temporary folder.
The server changes into its kit before it builds these components.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.job_def_manager import SimpleJobDefManager
from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME, JobMetaKey, RunStatus
from nvflare.app_common.logging.job_log_receiver import JobLogReceiver
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage
from nvflare.fuel.f3.cellnet.defs import IdentityChallengeKey
from nvflare.lighter import utils as flare
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.server.training_cmds import TrainingCommandModule
from nvflare.private.fed.utils.fed_utils import extract_participants

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import PRIVATE, locked, read_bytes, read_json, write_json
from fedtar_flare.provision.status import CERTIFICATES, REASON
from fedtar_flare.provision.wire import guard_cells, unfit_app, wrap
from fedtar_flare.record.events import End
from fedtar_flare.record.log import of_kind, read_events

logger = logging.getLogger(__name__)

ENDS_FILE = Path("fedtar_certificates.json")
"""In the kit, where the server works: seconds since 1970 at which the certificate of a site's last login ends."""


class KitStorage(FilesystemStorage):
    """FLARE's file storage in a folder below the kit; ConfigError for an absolute folder or one outside the kit."""

    def __init__(self, folder: str):
        self.folder = folder
        super().__init__(root_dir=str(_in_kit(folder)))


class KitJobManager(SimpleJobDefManager):
    """FLARE's job manager with its jobs and results in a folder below the kit. Raises ConfigError for any other folder.

    When a server that was killed with a job running starts again, FLARE leaves the job at RUNNING for ever and refuses
    downloads of its files. Here the job becomes ``FINISHED:ABNORMAL`` and can be resumed.

    A job is refused at its submission that names its own id (FLARE would take it and replace the folder of that name in
    the server's kit, such as ``local``) or a site that is neither among ``sites`` of the project nor connected (FLARE
    would wait for it for ever; empty: any name is taken).
    """

    def __init__(
        self, folder: str = "storage/jobs", job_store_id: str = "job_store", sites: Sequence[str] | None = None
    ):
        self.folder, self.sites = folder, list(sites or ())
        guard_cells()
        wrap(JobLogReceiver, "_on_chunk_received", lambda *_, **__: None)  # any sender could say which file it writes
        wrap(JobMetaValidator, "validate", validated)
        wrap(ServerEngine, "show_stats", stats_shown)
        wrap(ClientManager, "authenticated_client", logged_in)
        wrap(TrainingCommandModule, "check_status", status_checked)
        super().__init__(uri_root=str(_in_kit(folder)), job_store_id=job_store_id)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """When the server starts: end the jobs that it had left at RUNNING. When a job comes: refuse what is wrong."""
        if event_type == EventType.SUBMIT_JOB:
            try:
                connected = [client.name for client in fl_ctx.get_engine().get_clients()]
                reason = self._refusal(fl_ctx.get_prop(FLContextKey.JOB_META) or {}, connected)
            except Exception as error:  # FLARE would swallow it and take the job
                reason = f"the job's meta.json is malformed ({type(error).__name__})"
            if reason:
                fl_ctx.set_prop(FLContextKey.JOB_BLOCK_REASON, reason, private=True, sticky=False)
        if event_type != EventType.SYSTEM_BOOTSTRAP:
            return
        os.umask(0o077)  # logs name files and rows
        for job in self.get_jobs_by_status([RunStatus.RUNNING, RunStatus.DISPATCHED], fl_ctx):
            self.set_status(job.job_id, RunStatus.FINISHED_ABNORMAL, fl_ctx)
            text = "job %s was running when this server went down: it has ended ('fedtar resume' goes on with it)"
            logger.warning(text, job.job_id)

    def save_workspace(self, jid: str, data: Any, fl_ctx: FLContext) -> Any:
        """When a job has ended: put the reason of its record into the job's meta data, for which admins may ask."""
        for folder in data if isinstance(data, list) else ():
            with suppress(FedTARError, OSError):  # a job that never began has no record
                for end in of_kind(read_events(Path(folder) / "fedtar"), End):
                    self.update_meta(jid, {REASON: end.reason}, fl_ctx)
        return super().save_workspace(jid, data, fl_ctx)

    def _refusal(self, meta: Mapping[str, Any], connected: Sequence[str]) -> str:
        if meta.get(JobMetaKey.JOB_ID.value):
            return "a job must not name its own id: remove 'job_id' from its meta.json"
        wanted = {*(meta.get(JobMetaKey.MANDATORY_CLIENTS.value) or ())}
        for deployments in (meta.get(JobMetaKey.DEPLOY_MAP.value) or {}).values():
            sites = extract_participants(deployments)
            wanted |= {site for site in sites if site != SERVER_SITE_NAME and site.upper() != ALL_SITES}
        known = {*self.sites, *connected}
        if self.sites and (unknown := sorted(wanted - known)):
            return f"the project has no site {', '.join(map(repr, unknown))}; it has {', '.join(sorted(known))}"
        return ""


def validated(validate: Any, validator: JobMetaValidator, job_name: str, job_data: Any) -> Any:
    """Look at a submitted archive before FLARE unpacks a part of it."""
    try:
        reason = unfit_app(read_bytes(Path(job_data)) if isinstance(job_data, str) else job_data)
    except OSError as error:
        reason = f"the job cannot be read: {error}"
    return (False, reason, {}) if reason else validate(validator, job_name, job_data)


def stats_shown(show: Any, engine: ServerEngine, job_id: str) -> Any:
    """Ask how far a job of ours is once its controller is there: before that FLARE writes a traceback for each question
    into the job's log.
    """
    run_dir = Path.cwd() / job_id
    config = run_dir / "app_server" / "config" / "config_fed_server.json"
    ours = config.is_file() and b"fedtar_flare." in read_bytes(config)
    return {} if ours and not (run_dir / "fedtar").is_dir() else show(engine, job_id)


def logged_in(log_in: Any, manager: ClientManager, request: Any, fl_ctx: Any, client_type: Any) -> Any:
    """Note when the certificate ends that a site shows at its login."""
    client = log_in(manager, request, fl_ctx, client_type)
    if client is not None:  # FLARE has verified the certificate, and that the site has its key
        with suppress(FedTARError, OSError, TypeError, ValueError):  # a full disk keeps nobody out
            shown = flare.load_crt_chain_bytes(request.payload.get(IdentityChallengeKey.CERT))[0]
            with locked(ENDS_FILE):
                write_json(ENDS_FILE, _ends() | {client.name: shown.not_valid_after_utc.timestamp()}, PRIVATE)
    return client


def status_checked(check: Any, module: TrainingCommandModule, conn: Any, args: list[str]) -> None:
    """Tell admins with the server's status when certificates end."""
    check(module, conn, args)
    ends: dict[str, Any] = {}
    with suppress(FedTARError, OSError, ValueError):
        ends["server"] = flare.load_crt(Path("startup", "server.crt")).not_valid_after_utc.timestamp()
        ends |= _ends()
    conn.update_meta({CERTIFICATES: ends})


def _ends() -> dict[str, Any]:
    return read_json(ENDS_FILE) if ENDS_FILE.exists() else {}


def _in_kit(folder: str) -> Path:
    path = Path(folder)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ConfigError(f"folder '{folder}' must be below the kit, such as 'storage/jobs'")
    return Path.cwd() / path
