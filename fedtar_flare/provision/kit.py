"""What a kit of this plugin holds besides FLARE's own: allow-list, launcher, storage, site policy, rights.

The builder completes each kit that it makes; ``python -m fedtar_flare.provision.kit KIT`` completes any other.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.lighter.constants import ProvFileName
from nvflare.tool.deploy.deploy_common import LAUNCHER_IDS, PROCESS_CLIENT_LAUNCHER

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import PRIVATE, read_json, write_bytes, write_json
from fedtar_flare.core.log_fields import POSITION, Position
from fedtar_flare.registry import contract_of, default_names
from fedtar_flare.site.context import is_server
from fedtar_flare.site.policy import (
    AUDIT,
    AUTHORIZATION,
    GUARD,
    PRIVACY,
    RESOURCES,
    SERVER_CLASSES,
    SITE_CLASSES,
    guards_of,
    local_file,
    rights,
    too_wide,
)

LAUNCHER = "fedtar_flare.provision.launcher.SupervisedProcessLauncher"
STORAGE = "fedtar_flare.provision.storage.KitStorage"
JOBS = "fedtar_flare.provision.storage.KitJobManager"
LOGINS = "fedtar_flare.provision.logins.LoginAlarm"
FLARE_S_RELAY, RELAY = "nvflare.private.fed.app.relay.relay", "fedtar_flare.provision.relay"
"""Modules that start a relay."""
SCOPE, LOGS = "hospital", "log_config.json"
START, QUIET_START = "start_python 2>&1 &", "([[ ! -t 1 ]] || exec > /dev/null; start_python) 2>&1 &"
"""How FLARE's script starts its process, and how it does without printing its log, which log.txt has, on a terminal."""
OUTCOME_SECONDS = 60  # how long the server waits for a site's last word after a job's end; see ``prepare_start``


def complete(
    resources: Mapping[str, Any],
    *,
    server: bool,
    extra_classes: Sequence[str] = (),
    gpus: int = 0,
    gpu_memory: float = 0,
    max_restarts: int = 3,
    byoc: bool = False,
    sites: Sequence[str] = (),
    flare_classes: bool = False,
) -> dict[str, Any]:
    """FLARE's ``resources`` of a kit with what this plugin needs; complete ones come back unchanged.

    The settings are those of :class:`~fedtar_flare.provision.builder.KitBuilder`, with ``gpu_memory`` in GiB each;
    ``byoc``: whether a site starts jobs with code of their own; ``sites``: of the project (a server refuses jobs for
    others; empty: those that it has, else any). :class:`ConfigError` for resources that are not FLARE's, or a class
    path that is a package.
    """
    result = deepcopy(dict(resources))
    components = result.get("components")
    if not isinstance(components, list) or not isinstance(result.get("class_allow_list"), list):
        raise ConfigError("the resources have no 'components' or no 'class_allow_list': not made by FLARE 2.9")
    for path in extra_classes:
        parts = path.split(".")
        if len(parts) < 3 or not all(map(str.isidentifier, parts)) or not parts[-1][:1].isupper():
            raise ConfigError(f"'{path}' is not the full path of one class (package.module.Class); allow no packages")
    wanted = [*(SERVER_CLASSES if server else SITE_CLASSES), *extra_classes]
    result["class_list_enforcement_mode"] = "enforce"
    others = [path for path in result["class_allow_list"] if flare_classes or path not in DEFAULT_CLASS_ALLOW_LIST]
    result["class_allow_list"] = list(dict.fromkeys([*others, *wanted]))
    if server:
        result["snapshot_persistor"]["args"]["storage"] = {"path": STORAGE, "args": {"folder": "storage/snapshots"}}
        _set(components, "login_alarm", path=LOGINS, args={})
        known = sites or next((entry["args"].get("sites", ()) for entry in components if entry.get("path") == JOBS), ())
        jobs = {"folder": "storage/jobs", "job_store_id": "job_store"} | ({"sites": list(known)} if known else {})
        _set(components, "job_manager", path=JOBS, args=jobs)
    else:
        result["allow_log_streaming"] = False  # a site's log may name files and rows
        current: dict[str, Any] = next((entry for entry in components if entry.get("id") in LAUNCHER_IDS), {})
        launcher: dict[str, Any] = {"max_restarts": max_restarts} | ({"byoc": True} if byoc else {})
        chosen = current.get("path")
        arguments = current.get("args") or {}
        if chosen == LAUNCHER:
            launcher |= {"launcher": arguments["launcher"]} if "launcher" in arguments else {}
        elif chosen not in (None, PROCESS_CLIENT_LAUNCHER):  # by ``nvflare deploy prepare``
            launcher["launcher"] = {"path": chosen, "args": arguments}
        _set(components, str(current.get("id", "process_launcher")), path=LAUNCHER, args=launcher)
        if "launcher" not in launcher:  # containers and clusters hand out their resources themselves
            manager = {"num_of_gpus": gpus, "mem_per_gpu_in_GiB": gpu_memory, "expiration_period": 300}
            _set(components, "resource_manager", args=manager)
    return result


def site_policy(
    methods: Sequence[str], extra_names: Sequence[str] = (), filters: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """``local/privacy.json``: the methods that the site allows (empty: none), and the filters of every job."""
    names = {"extra_names": list(extra_names)} if extra_names else {}
    guard = {"path": GUARD, "args": {"methods": list(methods), **names}}
    scope = {"name": SCOPE, "properties": {}, "task_result_filters": [*map(dict, filters), guard]}
    scope["task_data_filters"] = [guard]  # it remembers what came down, to compare what goes up
    audit = {"id": "audit", "path": AUDIT, "args": {}}
    return {"scopes": [scope], "default_scope": SCOPE, "components": [audit]}


def log_lines(config: Mapping[str, Any]) -> dict[str, Any]:
    """FLARE's log configuration, with run, round, step and task in each line of ``log.json``; others stay as is."""
    result = deepcopy(dict(config))
    formatter = result.get("formatters", {}).get("jsonFormatter", {})
    handler = result.get("handlers", {}).get("jsonFileHandler", {})
    if "%(message)s" in (form := formatter.get("fmt", "")) and handler and "%(run)s" not in form:
        fields = "".join(f"%({name})s - " for name in POSITION)
        formatter["fmt"] = form.replace("%(message)s", f"{fields}%(message)s")
        result.setdefault("filters", {})["position"] = {"()": f"{Position.__module__}.{Position.__qualname__}"}
        handler["filters"] = [*handler.get("filters", ()), "position"]
    return result


def prepare_start(startup: Path, *, server: bool = False) -> list[Path]:
    """Change a kit's start script, where it has one, to what this plugin needs; returns the files that were written.

    What the process writes is for its own account alone: logs name files and rows. A server ends a job soon after its
    run did, even if a site was lost: FLARE 2.9 keeps such a job at RUNNING until the lost site's heartbeat is 10
    minutes old, and reads the limit only from the environment. An administrator's own value takes precedence. A relay
    is started by our module, which looks at what it passes on.
    """
    script, name = startup / "sub_start.sh", "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT"
    if not script.is_file():  # ``nvflare deploy prepare`` for containers removes it
        return []
    lines = {"umask 077": "umask 077"} | ({name: f"export {name}=${{{name}:-{OUTCOME_SECONDS}}}"} if server else {})
    before = script.read_text(encoding="utf-8")
    first, _, rest = before.partition("\n")
    missing = [line for mark, line in lines.items() if mark not in rest]
    after = "\n".join([first, *missing, rest]).replace(FLARE_S_RELAY, RELAY).replace(START, QUIET_START)
    return [] if after == before else [write_bytes(script, after.encode(), 0o700)]


def complete_kit(kit: Path, methods: Sequence[str] | None = None, **settings: Any) -> list[Path]:
    """Write what is missing into a kit that was provisioned without the builder; returns the files that were written.

    FLARE reads them in place of its ``*.default`` files; a relay has its start script alone. An authorization policy
    that the site has written itself stays, unless it lets an administrator read files or bring code: then ours takes
    its place, and the earlier one is kept beside it. A site without a privacy policy gets one that lists ``methods``
    (None: those that come with this package and have no caution); to one that it has, the methods given are added.
    ``settings`` are further ones of :func:`complete`.

    Raises ConfigError if it is no kit, or a method is not installed.
    """
    local, startup = kit / "local", kit / "startup"
    if (startup / ProvFileName.FED_RELAY_JSON).is_file():
        return prepare_start(startup)
    server = is_server(kit)
    for name in methods or ():
        contract_of(name)
    resources = complete(local_file(kit, RESOURCES), server=server, **settings)
    written = [write_json(local / RESOURCES, resources, PRIVATE)]
    written.append(write_json(local / LOGS, log_lines(local_file(kit, LOGS)), PRIVATE))
    if too_wide(before := local_file(kit, AUTHORIZATION)):
        if (local / AUTHORIZATION).is_file():
            written.append(write_json(local / f"{AUTHORIZATION}.before", before, PRIVATE))
        written.append(write_json(local / AUTHORIZATION, rights(), PRIVATE))
    written += prepare_start(startup, server=server)
    listed = (local / PRIVACY).is_file()
    if not server and (methods or not listed):
        policy = read_json(local / PRIVACY) if listed else site_policy(default_names() if methods is None else methods)
        for entry in guards_of(policy):
            arguments = entry.setdefault("args", {})
            arguments["methods"] = list(dict.fromkeys([*arguments.get("methods", ()), *(methods or ())]))
        written.append(write_json(local / PRIVACY, policy, PRIVATE))
    return written


def _set(components: list[dict[str, Any]], identity: str, **values: Any) -> None:
    component = next((entry for entry in components if entry.get("id") == identity), None)
    if component is None:
        components.append(component := {"id": identity})
    component.update(values)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m fedtar_flare.provision.kit KIT``."""
    parser = argparse.ArgumentParser(
        prog="python -m fedtar_flare.provision.kit",
        description="Put this plugin's classes, launcher and site policy into a FLARE kit that was made without them.",
    )
    parser.add_argument("kit", type=Path, help="folder of the kit, with local/ and startup/")
    which = (
        "add a method to those that local/privacy.json lists; may be repeated. Without that file: the methods it "
        "is to list (default: those of this package that have no caution; 'fedtar export --describe' prints it)"
    )
    parser.add_argument("--method", action="append", metavar="NAME", help=which)
    others = "leave FLARE's own classes allowed, for jobs of other plugins"
    parser.add_argument("--flare-classes", action="store_true", help=others)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that jobs may use here (default 0)")
    parser.add_argument("--gpu-memory", type=float, default=0, help="GiB of each")
    settings = vars(parser.parse_args(argv))
    try:
        written = complete_kit(settings.pop("kit"), settings.pop("method"), **settings)
    except FedTARError as error:
        print(error, file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
