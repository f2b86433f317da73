"""An administrator's connection to a running federation, from the startup kit alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtar_flare.errors import ConfigError, FedTARError
from fedtar_flare.files import read_json

CONNECT_SECONDS = 20.0


@contextlib.contextmanager
def open_session(kit: Path) -> Iterator[Any]:
    """FLARE's session of the admin user whose startup kit this is (it holds ``startup/``), closed at the end.

    Raises ConfigError if it is no admin's kit, FedTARError if the server does not answer or refuses.
    """
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    file = kit / "startup" / "fed_admin.json"
    if not file.is_file():
        raise ConfigError(f"{kit} is no startup kit of an admin user: {file} is not there")
    user = str(read_json(file).get("admin", {}).get("username", ""))
    session = None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # FLARE says what it connects to; a script reads our own output
            session = new_secure_session(user, str(kit.resolve()), timeout=CONNECT_SECONDS)
        yield session
    except FedTARError:
        raise
    except Exception as error:  # FLARE's sessions raise a dozen kinds; each has its reason as its text
        reason = str(error) or type(error).__name__
        raise FedTARError(f"the server refused or did not answer ({user}): {reason}") from error
    finally:
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()
