"""A site's own policy: its files, classes, methods, and administrators' rights.

FLARE's own policy gives the project admin every right and each organisation's staff the shell of its sites: ``cat`` and
``grep`` over the files of a kit, and jobs that bring code. Here nobody has either; what the documentation promises
(submit, list, abort, download, status, shutdown, disabling a site) stays.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import read_json

RESOURCES, PRIVACY, AUTHORIZATION = "resources.json", "privacy.json", "authorization.json"
"""Files below a kit's ``local/``."""

GUARD = "fedtar_flare.site.guard.OutboundGuard"
AUDIT = "fedtar_flare.site.audit.AuditTrail"
PRIVACY_FILTER = "fedtar_flare.site.privacy.GaussianPrivacy"

SERVER_CLASSES = (
    "fedtar_flare.runtime.controller.FederatedController",
    "fedtar_flare.methods.fedtar.controller.TemporalResidualController",
    "nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver",
)
SITE_CLASSES = (
    "fedtar_flare.runtime.site_executor.SiteExecutor",
    "fedtar_flare.methods.fedtar.executor.PatientAdaptiveExecutor",
    GUARD,
)
"""Classes that jobs build at a server, and at a site. Which methods these may run is for the site's guard to say."""

RESULT_FILTERS, DATA_FILTERS = "task_result_filters", "task_data_filters"
"""Lists of filters in a scope of ``privacy.json``: of results, which leave, and of tasks, which come."""


def local_file(kit: Path, name: str) -> dict[str, Any]:
    """Read a file of a kit's ``local/`` as FLARE does: its ``.default`` counts where there is no other."""
    for file in (kit / "local" / name, kit / "local" / f"{name}.default"):
        if file.is_file():
            return read_json(file)
    raise ConfigError(f"{kit / 'local'} has no {name}")


def allowed_methods(policy: Mapping[str, Any]) -> list[str]:
    """Methods that both guards of a scope list in the content of ``privacy.json``; those of all scopes together."""
    methods: dict[str, None] = {}
    for scope in entries_of(policy, "scopes"):
        results, tasks = _listed(scope, RESULT_FILTERS), _listed(scope, DATA_FILTERS)
        methods |= dict.fromkeys(name for name in results if name in tasks)
    return list(methods)


def entries_of(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The mappings in a list, such as scopes, a scope's filters of one kind, or components; all else is left out."""
    return [entry for entry in content.get(key) or [] if isinstance(entry, dict)]


def guards_of(policy: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the guards of all scopes, of tasks and of results."""
    scopes, kinds = entries_of(policy, "scopes"), (RESULT_FILTERS, DATA_FILTERS)
    return [e for scope in scopes for kind in kinds for e in entries_of(scope, kind) if class_of(e) == GUARD]


def class_of(entry: Mapping[str, Any]) -> str:
    """The full name of a filter's class."""
    return str(entry.get("path") or entry.get("name"))


def _listed(scope: Mapping[str, Any], kind: str) -> list[str]:
    """What all guards among a scope's filters of this kind allow."""
    lists = [
        (entry.get("args") or {}).get("methods") or [] for entry in entries_of(scope, kind) if class_of(entry) == GUARD
    ]
    return [str(name) for name in lists[0] if all(name in other for other in lists)] if lists else []


SHELL = ("shell_commands", "cat", "grep", "head", "ls", "pwd", "tail")
CODE = ("byoc", "server-predeployed-flwr")

_NEVER = dict.fromkeys(("shell_commands", *CODE), "none")
_RIGHTS = {
    "submit_job": ("any", "none", "any", "none"),
    "clone_job": ("n:submitter", "none", "n:submitter", "none"),
    "manage_job": ("any", "o:submitter", "n:submitter", None),
    "download_job": ("any", "o:submitter", "n:submitter", None),
    "download_job_components": ("any", None, "n:submitter", None),
    "view": ("any", "any", "any", "any"),
    "operate": ("any", "o:site", "none", "none"),
}
"""Rights of each of :data:`_ROLES`; None: FLARE's own default."""
_ROLES = ("project_admin", "org_admin", "lead", "member")


def rights(lead_byoc: bool = False) -> dict[str, Any]:
    """Make the content of ``local/authorization.json``."""
    roles: dict[str, dict[str, Any]] = {}
    for i, role in enumerate(_ROLES):
        roles[role] = {right: by_role[i] for right, by_role in _RIGHTS.items() if by_role[i]} | _NEVER
    if lead_byoc:
        roles["lead"]["byoc"] = "any"
    return {"format_version": "1.0", "permissions": roles}


def too_wide(policy: Mapping[str, Any]) -> list[str]:
    """List the rights that let somebody read a site's files or run code there."""
    permissions = policy.get("permissions")
    if not isinstance(permissions, Mapping):
        raise ConfigError("the authorization policy has no 'permissions'")
    dangerous = []
    for role, granted in permissions.items():
        if not isinstance(granted, Mapping):
            dangerous += [f"{role}: {_text(granted)}"] if _allows(granted) else []
            continue
        for name in (*SHELL, *CODE):
            if _allows(granted.get(name, "none")):
                dangerous.append(f"{role}: {name} {_text(granted[name])}")
    return dangerous


def _allows(expression: Any) -> bool:
    parts = expression if isinstance(expression, list) else [expression]
    return any(str(part).strip().lower() not in ("none", "no") for part in parts)


def _text(expression: Any) -> str:
    return ", ".join(map(str, expression)) if isinstance(expression, list) else str(expression)
