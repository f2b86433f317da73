"""The doctor's look at the kit's own policy: allow-list, site filters, privacy, participation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from fedtar_flare.errors import ConfigError, FedTARError
from fedtar_flare.files import read_json
from fedtar_flare.registry import contract_of
from fedtar_flare.site.approval import approvals
from fedtar_flare.site.doctor.finding import FAIL, OK, WARN, Finding
from fedtar_flare.site.participation import Participation
from fedtar_flare.site.participation import participation as read_participation
from fedtar_flare.site.place import Site, state_of
from fedtar_flare.site.policy import (
    AUDIT,
    DATA_FILTERS,
    GUARD,
    PRIVACY,
    PRIVACY_FILTER,
    RESOURCES,
    RESULT_FILTERS,
    SITE_CLASSES,
    allowed_methods,
    class_of,
    filters_of,
    scopes_of,
)
from fedtar_flare.site.site_file import SiteConfig

COMPLETE = "python -m fedtar_flare.provision.kit KIT"


def allow_list(kit: Path) -> list[Finding]:
    """Whether the classes of this package's jobs may be built here, and whether the list is enforced."""
    files = [kit / "local" / RESOURCES, kit / "local" / f"{RESOURCES}.default"]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        cure = "provision the kit again, or take the file from its archive"
        return [Finding(FAIL, "allow-list", f"{kit / 'local'} has no {RESOURCES}", cure)]
    try:
        content = read_json(file)
    except ConfigError as error:
        return [Finding(FAIL, "allow-list", str(error), "correct the file")]
    allowed = content.get("class_allow_list") or []
    missing = [path for path in SITE_CLASSES if not any(_allows(str(entry), path) for entry in allowed)]
    if missing:
        return [Finding(FAIL, "allow-list", f"{file}: {', '.join(missing)} may not be built here", f"run '{COMPLETE}'")]
    findings = [Finding(OK, "allow-list", f"{file.name}: the classes of this package's jobs may be built")]
    if other := [str(entry) for entry in allowed if entry in DEFAULT_CLASS_ALLOW_LIST and entry not in SITE_CLASSES]:
        text = f"{file.name}: {len(other)} classes of FLARE may be built that no job of this package needs"
        findings.append(Finding(WARN, "allow-list", text, f"run '{COMPLETE}', unless jobs of other plugins run here"))
    if content.get("class_list_enforcement_mode") != "enforce":
        cure = 'set "class_list_enforcement_mode": "enforce"'
        findings.append(Finding(WARN, "allow-list", f"{file.name}: the list is not enforced", cure))
    if content.get("allow_log_streaming"):
        cure = 'set "allow_log_streaming": false: a log may name files and rows'
        findings.append(Finding(WARN, "logs", f"{file.name}: a job may stream this site's log to the server", cure))
    return findings


def privacy(kit: Path, config: SiteConfig | None) -> list[Finding]:
    """Whether the guard stands last in every scope, for which methods, and the audit among the components."""
    file = kit / "local" / PRIVACY
    cure = f"run '{COMPLETE}', or put {GUARD} last into each scope's {RESULT_FILTERS} and into its {DATA_FILTERS}"
    if not file.is_file():
        return [Finding(FAIL, "site policy", f"{file} is not there: only the job's own filters would stand", cure)]
    try:
        content = read_json(file)
    except ConfigError as error:
        return [Finding(FAIL, "site policy", str(error), "correct the file")]
    scopes = scopes_of(content)
    names = [str(scope.get("name")) for scope in scopes]
    if not scopes or content.get("default_scope") not in names:
        return [Finding(FAIL, "site policy", f"{file} has no scope, or default_scope is none of them", cure)]
    findings = []
    for scope, name in zip(scopes, names, strict=True):
        results, tasks = filters_of(scope, RESULT_FILTERS), filters_of(scope, DATA_FILTERS)
        if not results or class_of(results[-1]) != GUARD or GUARD not in map(class_of, tasks):
            findings.append(Finding(FAIL, "site policy", f"scope '{name}': the outbound guard is not in force", cure))
        for entry in (*tasks, *results):
            if class_of(entry) == GUARD:
                findings += _guard(name, entry.get("args") or {})
        for path in map(class_of, results):
            if path.endswith((".SVTPrivacy", ".PercentilePrivacy")):
                use = f"use {PRIVACY_FILTER}"
                findings.append(Finding(WARN, "site policy", f"scope '{name}': {path} is no differential privacy", use))
        for entry in results:
            if class_of(entry) == PRIVACY_FILTER:
                findings += _differential_privacy(kit, config, entry.get("args") or {})
    if not any(finding.check == "site policy" for finding in findings):
        findings.append(Finding(OK, "site policy", f"the outbound guard has the last word in {', '.join(names)}"))
        findings += _allowed(content)
    components = [entry.get("path") for entry in content.get("components") or [] if isinstance(entry, dict)]
    if AUDIT not in components:
        add = f'add to {PRIVACY} "components": [{{"id": "audit", "path": "{AUDIT}", "args": {{}}}}]'
        findings.append(Finding(WARN, "audit", "only jobs of this package are recorded, not others", add))
    return findings


def bounds(kit: Path | None, config: SiteConfig) -> list[Finding]:
    """What a job may ask here, where that is more than it need be, and whether the site's models are there."""
    policy = config.policy
    shown = [
        f"{name} {'no bound' if value is None else value}"
        for name, value in policy
        if name not in ("approval", "models")
    ]
    text = f"a job may ask: {', '.join(shown)}; models: {', '.join(['the shipped one', *policy.models])}"
    findings = [Finding(OK, "job bounds", text)]
    if config.source != "synthetic" and (looser := policy.looser()):
        cure = "remove them from policy in the site file, unless this is meant"
        findings = [Finding(WARN, "job bounds", f"{text}. Looser than the defaults: {', '.join(looser)}", cure)]
    for name, path in policy.models.items():
        if path is not None and not path.exists():
            cure = "put the model there, or correct policy.models in the site file"
            findings.append(Finding(FAIL, "job bounds", f"model '{name}': {path} is not there", cure))
    if policy.approval == "none":
        findings.append(Finding(OK, "approval", "a job within these bounds needs no approval"))
    elif kit is not None:
        findings.append(_approvals(kit))
    return findings


def participation(kit: Path) -> Finding:
    """Whether the site takes part now."""
    try:
        state = read_participation(state_of(kit))
    except FedTARError as error:
        return Finding(FAIL, "participation", str(error), "run 'fedtar site join' (or pause, leave)")
    if state is not Participation.TAKING_PART:
        return Finding(WARN, "participation", f"this site has {state.value}", "run 'fedtar site join' to take part")
    return Finding(OK, "participation", "this site takes part")


def _approvals(kit: Path) -> Finding:
    try:
        number = len(approvals(Site.outside_of_jobs(kit.name, kit, simulated=False).records))
    except FedTARError as error:
        return Finding(FAIL, "approval", str(error), "delete the file, and approve the job again")
    return Finding(OK, "approval", f"required; {number} job(s) approved ('fedtar site approve --list')")


def _guard(scope: str, arguments: dict[str, Any]) -> list[Finding]:
    from fedtar_flare.site.guard import OutboundGuard

    try:
        OutboundGuard(**arguments)
    except (FedTARError, TypeError) as error:
        return [Finding(FAIL, "site policy", f"scope '{scope}': {error}", f"correct the guard's args in {PRIVACY}")]
    return []


def _allowed(content: dict[str, Any]) -> list[Finding]:
    """Which methods the site allows, and names among them that are no method here."""
    allowed, cure = allowed_methods(content), f"correct 'methods' of both guards in {PRIVACY}"
    if not allowed:
        return [Finding(FAIL, "methods", "this site allows no method, so every task is declined", cure)]
    findings = [Finding(OK, "methods", f"this site takes part in {', '.join(allowed)}")]
    for name in allowed:
        try:
            contract_of(name)
        except ConfigError as error:
            findings.append(Finding(WARN, "methods", str(error), f"{cure}, or install the package that brings it"))
    return findings


def _differential_privacy(kit: Path, config: SiteConfig | None, arguments: dict[str, Any]) -> list[Finding]:
    from fedtar_flare.site.accountant import FILE, Ledger
    from fedtar_flare.site.privacy import GaussianPrivacy

    check = "differential privacy"
    if config is not None and "losses" in (config.shares or ()):
        cure = "remove losses from shares in the site file"
        return [Finding(FAIL, check, "shares sends losses past the privacy filter", cure)]
    try:
        settings = GaussianPrivacy(**arguments)
        spent = Ledger(state_of(kit) / FILE).spent(settings.delta)
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
