"""The doctor's look at the kit's own policy (classes, filters, bounds, participation) and at who reaches its files."""

import re
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import read_json
from fedtar_flare.registry import contract_of
from fedtar_flare.site.approval import approvals
from fedtar_flare.site.context import UNFIT, Participation, state_of
from fedtar_flare.site.context import participation as read_participation
from fedtar_flare.site.doctor import FAIL, OK, WARN, Finding
from fedtar_flare.site.policy import (
    AUDIT,
    AUTHORIZATION,
    DATA_FILTERS,
    GUARD,
    PRIVACY,
    PRIVACY_FILTER,
    RESOURCES,
    RESULT_FILTERS,
    SITE_CLASSES,
    allowed_methods,
    class_of,
    entries_of,
    local_file,
    too_wide,
)
from fedtar_flare.site.site_file import SiteConfig, cache_folder, state_folder

COMPLETE = "python -m fedtar_flare.provision.kit KIT"
RESTART = f"run '{COMPLETE}' and start the site again"

_OURS = re.compile(r"fedtar_flare\..+\.SupervisedProcessLauncher$")


def allow_list(kit: Path) -> list[Finding]:
    """Whether the classes of this package's jobs may be built here, and whether the list is enforced."""
    try:
        content = local_file(kit, RESOURCES)
    except ConfigError as error:
        return [Finding(FAIL, "allow-list", str(error), "correct the file, or provision the kit again")]
    allowed = [str(entry) for entry in content.get("class_allow_list") or []]
    missing = [
        path
        for path in SITE_CLASSES
        if not any(entry == path or (entry.endswith(".") and path.startswith(entry)) for entry in allowed)
    ]
    if missing:
        text = f"{RESOURCES}: {', '.join(missing)} may not be built here"
        return [Finding(FAIL, "allow-list", text, f"run '{COMPLETE}'")]
    findings = [Finding(OK, "allow-list", f"{RESOURCES}: the classes of this package's jobs may be built")]
    if other := [entry for entry in allowed if entry in DEFAULT_CLASS_ALLOW_LIST and entry not in SITE_CLASSES]:
        text = f"{RESOURCES}: {len(other)} classes of FLARE may be built that no job of this package needs"
        findings.append(Finding(WARN, "allow-list", text, f"run '{COMPLETE}', unless jobs of other plugins run here"))
    if content.get("class_list_enforcement_mode") != "enforce":
        cure = 'set "class_list_enforcement_mode": "enforce"'
        findings.append(Finding(WARN, "allow-list", f"{RESOURCES}: the list is not enforced", cure))
    if content.get("allow_log_streaming"):
        cure = 'set "allow_log_streaming": false: a log may name files and rows'
        findings.append(Finding(WARN, "logs", f"{RESOURCES}: a job may stream this site's log to the server", cure))
    return findings


def privacy(kit: Path, config: SiteConfig | None) -> list[Finding]:
    """Whether the guard is the last filter of every scope, for which methods, and whether there is an audit."""
    from fedtar_flare.site.guard import OutboundGuard  # which imports torch

    file = kit / "local" / PRIVACY
    cure = f"run '{COMPLETE}', or put {GUARD} last into each scope's {RESULT_FILTERS} and into its {DATA_FILTERS}"
    if not file.is_file():
        return [Finding(FAIL, "site policy", f"{file} is not there: only the job's own filters would stand", cure)]
    try:
        content = read_json(file)
    except ConfigError as error:
        return [Finding(FAIL, "site policy", str(error), "correct the file")]
    scopes = entries_of(content, "scopes")
    names = [str(scope.get("name")) for scope in scopes]
    if not scopes or content.get("default_scope") not in names:
        return [Finding(FAIL, "site policy", f"{file} has no scope, or default_scope is none of them", cure)]
    findings = []
    for scope, name in zip(scopes, names, strict=True):
        results, tasks = entries_of(scope, RESULT_FILTERS), entries_of(scope, DATA_FILTERS)
        if not results or class_of(results[-1]) != GUARD or GUARD not in map(class_of, tasks):
            findings.append(Finding(FAIL, "site policy", f"scope '{name}': the outbound guard is not in force", cure))
        for entry in (*tasks, *results):
            try:
                if class_of(entry) == GUARD:
                    OutboundGuard(**entry.get("args") or {})
            except (FedTARError, TypeError) as error:
                mend = f"correct the guard's args in {PRIVACY}"
                findings.append(Finding(FAIL, "site policy", f"scope '{name}': {error}", mend))
        for entry in results:
            if (path := class_of(entry)).endswith((".SVTPrivacy", ".PercentilePrivacy")):
                use = f"use {PRIVACY_FILTER}"
                findings.append(Finding(WARN, "site policy", f"scope '{name}': {path} is no differential privacy", use))
            elif path == PRIVACY_FILTER:
                findings.append(_differential_privacy(kit, config, entry.get("args") or {}))
    if not any(finding.check == "site policy" for finding in findings):
        findings.append(Finding(OK, "site policy", f"the outbound guard has the last word in {', '.join(names)}"))
        findings += _methods(allowed_methods(content))
    if AUDIT not in [entry.get("path") for entry in entries_of(content, "components")]:
        add = f'add to {PRIVACY} "components": [{{"id": "audit", "path": "{AUDIT}", "args": {{}}}}]'
        findings.append(Finding(WARN, "audit", "only jobs of this package are recorded, not others", add))
    return findings


def _methods(allowed: list[str]) -> list[Finding]:
    """Which methods the site allows, and names among them that are no method here."""
    cure = f"correct 'methods' of both guards in {PRIVACY}"
    if not allowed:
        return [Finding(FAIL, "methods", "this site allows no method, so every task is declined", cure)]
    findings = [Finding(OK, "methods", f"this site takes part in {', '.join(allowed)}")]
    for name in allowed:
        try:
            if caution := contract_of(name).caution:
                findings.append(Finding(WARN, "methods", f"{name}: {caution}", f"remove it from {PRIVACY} if unused"))
        except ConfigError as error:
            findings.append(Finding(WARN, "methods", str(error), f"{cure}, or install the package that brings it"))
    return findings


def _differential_privacy(kit: Path, config: SiteConfig | None, arguments: dict[str, Any]) -> Finding:
    from fedtar_flare.site.accountant import FILE, Ledger
    from fedtar_flare.site.privacy import GaussianPrivacy

    check = "differential privacy"
    try:
        settings = GaussianPrivacy(**arguments).settings
        spent = Ledger(state_of(kit) / FILE).spent(settings.delta)
    except FedTARError as error:
        return Finding(FAIL, check, str(error), "correct privacy.json, or restore the ledger")
    text = f"epsilon {spent.epsilon:.3g} of {settings.max_epsilon:g} spent in {spent.releases} releases"
    number = {"fedtar_epsilon_spent": spent.epsilon}
    if spent.epsilon > 0.9 * settings.max_epsilon:
        cure = "the site abstains soon; a larger max_epsilon is a decision of the site's"
        return Finding(WARN, check, text, cure, number)
    return Finding(OK, check, f"{text} (delta {settings.delta:g})", "", number)


def bounds(kit: Path | None, config: SiteConfig) -> list[Finding]:
    """The site's bounds on jobs, those looser than the defaults, and whether the site's models are there."""
    policy = config.policy
    amounts = {name: value for name, value in policy if name not in ("approval", "models")}
    shown = ", ".join(f"{name} {'no bound' if value is None else value}" for name, value in amounts.items())
    text = f"a job may ask: {shown}; models: {', '.join(['the shipped one', *policy.models])}"
    findings = [Finding(OK, "job bounds", text)]
    if config.source != "synthetic" and (looser := policy.looser()):
        cure = "remove them from policy in the site file, unless this is meant"
        findings = [Finding(WARN, "job bounds", f"{text}. Looser than the defaults: {', '.join(looser)}", cure)]
    for name, path in policy.models.items():
        if path is not None and not path.exists():
            cure = "put the model there, or correct policy.models in the site file"
            findings.append(Finding(FAIL, "job bounds", f"model '{name}': {path} is not there", cure))
    if policy.approval == "none":
        status, cure = (OK, "") if config.source == "synthetic" else (WARN, "set policy.approval: required")
        findings.append(Finding(status, "approval", "a job within these bounds needs no approval", cure))
    elif kit is not None:
        try:
            text = f"required; {len(approvals(state_of(kit)))} job(s) approved ('fedtar site approve --list')"
            findings.append(Finding(OK, "approval", text))
        except FedTARError as error:
            findings.append(Finding(FAIL, "approval", str(error), "delete the file, and approve the job again"))
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


def rights(kit: Path) -> Finding:
    """Whether some role may read the site's files through FLARE's console, or bring code."""
    try:
        dangerous = too_wide(local_file(kit, AUTHORIZATION))
    except ConfigError as error:
        return Finding(FAIL, "rights", str(error), RESTART)
    if dangerous:
        text = f"the authorization policy lets administrators read files or bring code ({'; '.join(dangerous)})"
        return Finding(FAIL, "rights", text, RESTART)
    return Finding(OK, "rights", "no administrator may read files here or bring code")


def shell(kit: Path) -> Finding:
    """Whether the site refuses the shell whatever the server says of a request's rights."""
    try:
        components = entries_of(local_file(kit, RESOURCES), "components")
    except ConfigError:  # the allow-list says so
        components = []
    entries = [entry for entry in components if _OURS.match(str(entry.get("path")))]
    if not entries:
        text = f"{RESOURCES} does not have our launcher: the server can read this account's files by a shell"
        return Finding(FAIL, "shell", text, RESTART)
    if (entries[0].get("args") or {}).get("byoc"):
        cure = f'remove "byoc" from the args of process_launcher in {RESOURCES}, unless the site wants it so'
        return Finding(WARN, "shell", "refused, but jobs may bring code, which can do whatever this account can", cure)
    return Finding(OK, "shell", "refused, whoever asks, and so are jobs with code of their own")


def locations(kit: Path, config: SiteConfig | None) -> list[Finding]:
    """Whether data, prepared images or state lie inside the kit, where FLARE's console reads text files."""
    named = {"state": state_folder(kit, config)}
    if config is not None:
        named |= {"path": config.path, "exclude": config.exclude, "cache_dir": cache_folder(config)}
    findings = []
    if UNFIT.search(str(kit.resolve())):
        text = f"FLARE starts nothing in {kit.resolve()}: the path has a space, a quote, a backslash or a hash"
        findings.append(Finding(WARN, "places", text, "move the kit to a folder without one, and start the site there"))
    for name, path in named.items():
        if path is not None and path.resolve().is_relative_to(kit.resolve()):
            cure = f"move it out of the kit and change '{name}' in the site file"
            findings.append(Finding(FAIL, "places", f"{name} lies inside the kit ({path})", cure))
    return findings or [Finding(OK, "places", "neither data nor state lie inside the kit")]


def modes(kit: Path, config: SiteConfig | None) -> list[Finding]:
    """Whether other users of this machine can read the kit or the site's state."""
    folders = [folder for folder in (kit, state_folder(kit, config)) if folder and folder.is_dir()]
    findings = [
        Finding(FAIL, "file modes", f"{folder} can be read by other users of this machine", f"chmod -R go= {folder}")
        for folder in folders
        if folder.stat().st_mode & 0o077
    ]
    return findings or [Finding(OK, "file modes", "kit and state belong to this account alone")]
