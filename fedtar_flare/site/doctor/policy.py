"""The kit's own policy: allow-list, site filters, privacy, participation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedtar_flare.errors import FedTARError
from fedtar_flare.provision.kit import AUDIT, GUARD, SITE_CLASSES
from fedtar_flare.site.doctor.finding import FAIL, OK, WARN, Finding
from fedtar_flare.site.participation import Participation
from fedtar_flare.site.participation import participation as read_participation
from fedtar_flare.site.place import STATE
from fedtar_flare.site.site_file import SiteConfig

PRIVACY_FILTER = "fedtar_flare.site.privacy.GaussianPrivacy"
COMPLETE = "python -m fedtar_flare.provision.kit KIT"


def allow_list(kit: Path) -> list[Finding]:
    """Whether the shipped job's classes may be built here, and whether whole packages may."""
    file = _own_or_default(kit, "resources.json")
    if file is None:
        cure = "provision the kit again, or take the file from its archive"
        return [Finding(FAIL, "allow-list", f"{kit / 'local'} has no resources.json", cure)]
    content, problem = _read(file)
    if problem is not None:
        return [Finding(FAIL, "allow-list", problem, "correct the file")]
    allowed = content.get("class_allow_list") or []
    missing = [path for path in SITE_CLASSES if not any(_allows(str(entry), path) for entry in allowed)]
    if missing:
        return [Finding(FAIL, "allow-list", f"{file}: {', '.join(missing)} may not be built here", f"run '{COMPLETE}'")]
    findings = [Finding(OK, "allow-list", f"{file.name}: the shipped job's classes may be built")]
    if content.get("class_list_enforcement_mode") != "enforce":
        cure = 'set "class_list_enforcement_mode": "enforce"'
        findings.append(Finding(WARN, "allow-list", f"{file.name}: the list is not enforced", cure))
    if content.get("allow_log_streaming"):
        cure = 'set "allow_log_streaming": false: a log may name files and rows'
        findings.append(Finding(WARN, "logs", f"{file.name}: a job may stream this site's log to the server", cure))
    return findings


def privacy(kit: Path, config: SiteConfig | None) -> list[Finding]:
    """Whether the guard stands last in every scope, and the audit among the components."""
    file = kit / "local" / "privacy.json"
    cure = f"run '{COMPLETE}', or put {GUARD} last into each scope's task_result_filters and into its task_data_filters"
    if not file.is_file():
        return [Finding(FAIL, "site policy", f"{file} is not there: only the job's own filters would stand", cure)]
    content, problem = _read(file)
    if problem is not None:
        return [Finding(FAIL, "site policy", problem, "correct the file")]
    scopes = [scope for scope in content.get("scopes") or [] if isinstance(scope, dict)]
    names = [str(scope.get("name")) for scope in scopes]
    if not scopes or content.get("default_scope") not in names:
        return [Finding(FAIL, "site policy", f"{file} has no scope, or default_scope is none of them", cure)]
    findings = []
    for scope, name in zip(scopes, names, strict=True):
        results, tasks = _paths(scope, "task_result_filters"), _paths(scope, "task_data_filters")
        if results[-1:] != [GUARD] or GUARD not in tasks:
            findings.append(Finding(FAIL, "site policy", f"scope '{name}': the outbound guard is not in force", cure))
        for path in (r for r in results if r.endswith((".SVTPrivacy", ".PercentilePrivacy"))):
            use = f"use {PRIVACY_FILTER}"
            findings.append(Finding(WARN, "site policy", f"scope '{name}': {path} is no differential privacy", use))
        for entry in scope.get("task_result_filters") or []:
            if isinstance(entry, dict) and entry.get("path") == PRIVACY_FILTER:
                findings += _differential_privacy(kit, config, entry.get("args") or {})
    if not any(finding.check == "site policy" for finding in findings):
        findings.append(Finding(OK, "site policy", f"the outbound guard has the last word in {', '.join(names)}"))
    components = [entry.get("path") for entry in content.get("components") or [] if isinstance(entry, dict)]
    if AUDIT not in components:
        add = f'add to privacy.json "components": [{{"id": "audit", "path": "{AUDIT}", "args": {{}}}}]'
        findings.append(Finding(WARN, "audit", "only jobs of this package are recorded, not others", add))
    return findings


def participation(kit: Path) -> Finding:
    """Whether the site takes part now."""
    try:
        state = read_participation(kit / STATE)
    except FedTARError as error:
        return Finding(FAIL, "participation", str(error), "run 'fedtar site join' (or pause, leave)")
    if state is not Participation.TAKING_PART:
        return Finding(WARN, "participation", f"this site has {state.value}", "run 'fedtar site join' to take part")
    return Finding(OK, "participation", "this site takes part")


def _differential_privacy(kit: Path, config: SiteConfig | None, arguments: dict[str, Any]) -> list[Finding]:
    from fedtar_flare.site.accountant import FILE, Ledger
    from fedtar_flare.site.privacy import GaussianPrivacy

    check = "differential privacy"
    if config is not None and config.stream_losses:
        cure = "remove stream_losses from the site file"
        return [Finding(FAIL, check, "stream_losses sends losses past the privacy filter", cure)]
    try:
        settings = GaussianPrivacy(**arguments)
        spent = Ledger(kit / STATE / FILE).spent(settings.delta)
    except (FedTARError, TypeError) as error:
        return [Finding(FAIL, check, str(error), "correct privacy.json, or restore the ledger")]
    if settings.noise_seed is not None:
        return [Finding(FAIL, check, "noise_seed is set: the noise could be taken away", "remove it from privacy.json")]
    text = f"epsilon {spent.epsilon:.3g} of {settings.max_epsilon:g} spent in {spent.releases} releases"
    if spent.epsilon > 0.9 * settings.max_epsilon:
        return [Finding(WARN, check, text, "the site abstains soon; a larger max_epsilon is a decision of the site's")]
    return [Finding(OK, check, f"{text} (delta {settings.delta:g})")]


def _allows(entry: str, path: str) -> bool:
    return entry == path or (entry.endswith(".") and path.startswith(entry))


def _paths(scope: dict[str, Any], kind: str) -> list[str]:
    return [str(entry.get("path") or entry.get("name")) for entry in scope.get(kind) or [] if isinstance(entry, dict)]


def _own_or_default(kit: Path, name: str) -> Path | None:
    files = [kit / "local" / name, kit / "local" / f"{name}.default"]
    return next((file for file in files if file.is_file()), None)


def _read(file: Path) -> tuple[dict[str, Any], str | None]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, f"{file}: not readable as JSON ({error})"
    return (content, None) if isinstance(content, dict) else ({}, f"{file}: not a JSON object")
