"""When participants' certificates end, for admins who ask: by FLARE's protocol a site shows its own at each login."""

from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.cellnet.defs import IdentityChallengeKey
from nvflare.lighter import utils as flare
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.server.training_cmds import TrainingCommandModule

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import PRIVATE, locked, write_json
from fedtar_flare.provision.status import CERTIFICATES
from fedtar_flare.site.job_records import read_record

FILE = Path("fedtar_certificates.json")
"""In the kit, where the server works: seconds since 1970 at which the certificate of a site's last login ends."""


def watch_certificates() -> None:
    """Note when the certificate of a login ends, and tell it with the server's status; only the first call counts."""
    log_in: Any = ClientManager.authenticated_client
    if hasattr(log_in, "__wrapped__"):
        return
    say: Any = TrainingCommandModule.check_status

    @wraps(log_in)
    def noting(self: ClientManager, request: Any, fl_ctx: Any, client_type: Any) -> Any:
        client = log_in(self, request, fl_ctx, client_type)
        if client is not None:  # FLARE has verified the certificate, and that the site has its key
            with suppress(FedTARError, OSError, TypeError, ValueError):  # a full disk keeps nobody out
                shown = flare.load_crt_chain_bytes(request.payload.get(IdentityChallengeKey.CERT))[0]
                with locked(FILE):
                    ends = read_record(FILE) | {client.name: shown.not_valid_after_utc.timestamp()}
                    write_json(FILE, ends, PRIVATE)
        return client

    @wraps(say)
    def telling(self: TrainingCommandModule, conn: Any, args: list[str]) -> None:
        say(self, conn, args)
        ends: dict[str, Any] = {}
        with suppress(FedTARError, OSError, ValueError):
            ends["server"] = flare.load_crt(Path("startup", "server.crt")).not_valid_after_utc.timestamp()
            ends |= read_record(FILE)
        conn.update_meta({CERTIFICATES: ends})

    ClientManager.authenticated_client, TrainingCommandModule.check_status = noting, telling
