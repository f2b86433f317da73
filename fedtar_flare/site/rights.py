"""Who of FLARE's administrators may do what at a site: the policy of our kits, and what is too wide in another one.

FLARE's own policy gives the project admin every right and each organisation's staff the shell of its sites: ``cat`` and
``grep`` over the files of a kit, and jobs that bring code. Here nobody has either; what the documentation promises
(submit, list, abort, download, status, shutdown, disabling a site) stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedtar_flare.errors import ConfigError

SHELL = ("shell_commands", "cat", "grep", "head", "ls", "pwd", "tail")
CODE = ("byoc", "server-predeployed-flwr")

_NEVER = {"shell_commands": "none", "byoc": "none", "server-predeployed-flwr": "none"}
_ROLES: dict[str, dict[str, str]] = {
    "project_admin": {
        "submit_job": "any",
        "clone_job": "n:submitter",
        "manage_job": "any",
        "download_job": "any",
        "download_job_components": "any",
        "view": "any",
        "operate": "any",
    },
    "org_admin": {
        "submit_job": "none",
        "clone_job": "none",
        "manage_job": "o:submitter",
        "download_job": "o:submitter",
        "view": "any",
        "operate": "o:site",
    },
    "lead": {
        "submit_job": "any",
        "clone_job": "n:submitter",
        "manage_job": "n:submitter",
        "download_job": "n:submitter",
        "download_job_components": "n:submitter",
        "view": "any",
        "operate": "none",
    },
    "member": {"submit_job": "none", "clone_job": "none", "view": "any", "operate": "none"},
}


def rights(lead_byoc: bool = False) -> dict[str, Any]:
    """Content of ``local/authorization.json``; ``lead_byoc`` lets a lead bring code of their own."""
    roles = {role: {**given, **_NEVER} for role, given in _ROLES.items()}
    if lead_byoc:
        roles["lead"]["byoc"] = "any"
    return {"format_version": "1.0", "permissions": roles}


def too_wide(policy: Mapping[str, Any]) -> list[str]:
    """What a policy allows that lets somebody read a site's files or run code there, such as ``project_admin: any``.

    Raises ConfigError if it is no policy of FLARE's.
    """
    permissions = policy.get("permissions")
    if not isinstance(permissions, Mapping):
        raise ConfigError("the authorization policy has no 'permissions'")
    found = []
    for role, given in permissions.items():
        if not isinstance(given, Mapping):
            found += [f"{role}: {_text(given)}"] if _allows(given) else []
            continue
        named = [name for name in (*SHELL, *CODE) if _allows(given.get(name, "none"))]
        found += [f"{role}: {name} {_text(given[name])}" for name in named]
    return found


def _allows(expression: Any) -> bool:
    parts = expression if isinstance(expression, list) else [expression]
    return any(str(part).strip().lower() not in ("none", "no") for part in parts)


def _text(expression: Any) -> str:
    return ", ".join(map(str, expression)) if isinstance(expression, list) else str(expression)
