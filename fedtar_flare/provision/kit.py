"""What a kit of this plugin holds beside FLARE's own: allow-list, launcher, storage, site policy, rights.

The builder completes each kit that it makes; ``python -m fedtar_flare.provision.kit KIT`` completes any other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from fedtar_flare.errors import ConfigError, FedTARError
from fedtar_flare.files import read_json, replacing, write_json
from fedtar_flare.methods import METHODS
from fedtar_flare.site.policy import AUDIT, AUTHORIZATION, GUARD, PRIVACY, RESOURCES, server_classes, site_classes

LAUNCHER = "fedtar_flare.provision.launcher.SupervisedProcessLauncher"
STORAGE = "fedtar_flare.provision.storage.KitStorage"
JOBS = "fedtar_flare.provision.storage.KitJobManager"
SCOPE = "hospital"
OUTCOME_SECONDS = 60
"""How long the server waits for a site's last word after a job's end; see :func:`end_jobs_soon`."""


def complete(
    resources: Mapping[str, Any],
    *,
    server: bool,
    methods: Sequence[str] = (),
    extra_classes: Sequence[str] = (),
    gpus: int = 0,
    gpu_memory: float = 0,
    max_restarts: int = 3,
) -> dict[str, Any]:
    """FLARE's resources of a kit with what this plugin needs; complete ones come back unchanged.

    Args:
        resources: content of ``local/resources.json.default``.
        methods: whose jobs may run here; empty: all that are installed.
        extra_classes: full class paths that jobs may use beside those of the methods.
        gpus, gpu_memory: what a job may ask a site for with ``resource_spec`` (number, GiB each).

    Raises:
        ConfigError: the resources are not FLARE's, a method is not installed, or a class path is a whole package.
    """
    result = deepcopy(dict(resources))
    components = result.get("components")
    if not isinstance(components, list) or not isinstance(result.get("class_allow_list"), list):
        raise ConfigError("the resources have no 'components' or no 'class_allow_list': not made by FLARE 2.9")
    for path in extra_classes:
        if not _is_class(path):
            raise ConfigError(f"'{path}' is not the full path of one class (package.module.Class); allow no packages")
    wanted = [*(server_classes(methods) if server else site_classes(methods)), *extra_classes]
    result["class_list_enforcement_mode"] = "enforce"
    result["class_allow_list"] += [path for path in wanted if path not in result["class_allow_list"]]
    if server:
        result["snapshot_persistor"]["args"]["storage"] = {"path": STORAGE, "args": {"folder": "storage/snapshots"}}
        _set(components, "job_manager", path=JOBS, args={"folder": "storage/jobs", "job_store_id": "job_store"})
    else:
        result["allow_log_streaming"] = False  # a site's log may name files and rows
        _set(components, "process_launcher", path=LAUNCHER, args={"max_restarts": max_restarts})
        manager = {"num_of_gpus": gpus, "mem_per_gpu_in_GiB": gpu_memory, "expiration_period": 300}
        _set(components, "resource_manager", args=manager)
    return result


def site_policy(
    methods: Sequence[str] = (), extra_names: Sequence[str] = (), filters: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """``local/privacy.json``: the site's own filters, which run with every job.

    The methods (empty: all that are installed now) are listed by name, so that a method of a later release needs the
    site's own decision. ``filters`` and ``extra_names`` are those of ``KitBuilder``; the guard has the last word.
    """
    names = {"extra_names": list(extra_names)} if extra_names else {}
    guard = {"path": GUARD, "args": {"methods": list(methods or METHODS), **names}}
    return {
        "scopes": [
            {
                "name": SCOPE,
                "properties": {},
                "task_result_filters": [*(dict(entry) for entry in filters), guard],
                "task_data_filters": [guard],  # it remembers what came down, to compare what goes up
            }
        ],
        "default_scope": SCOPE,
        "components": [{"id": "audit", "path": AUDIT, "args": {}}],
    }


def without_byoc(policy: Mapping[str, Any]) -> dict[str, Any]:
    """FLARE's default authorization policy, except that a lead may not bring code of their own into a job."""
    result = deepcopy(dict(policy))
    try:
        result["permissions"]["lead"]["byoc"] = "none"
    except (KeyError, TypeError) as error:
        raise ConfigError("the authorization policy has no permissions for the role 'lead'") from error
    return result


def end_jobs_soon(startup: Path) -> bool:
    """Let the server end a job soon after its run did, even if a site was lost; returns whether anything changed.

    FLARE 2.9 keeps such a job at RUNNING until the lost site's heartbeat is 10 minutes old, and reads the limit only
    from the environment. So the server's start script sets it; an administrator's own value takes precedence.
    """
    script, name = startup / "sub_start.sh", "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT"
    first, _, rest = script.read_text(encoding="utf-8").partition("\n")
    if name in rest:
        return False
    mode = script.stat().st_mode
    with replacing(script) as temporary:
        temporary.write_text(f"{first}\nexport {name}=${{{name}:-{OUTCOME_SECONDS}}}\n{rest}", encoding="utf-8")
        temporary.chmod(mode)
    return True


def complete_kit(kit: Path, methods: Sequence[str] = (), **settings: Any) -> list[Path]:
    """Write what is missing into a kit that was provisioned without the builder; returns the files that were written.

    FLARE reads them in place of its ``*.default`` files. A policy that the site has written itself stays. ``settings``
    are further ones of :func:`complete`.

    Raises ConfigError if it is no kit of a server or site.
    """
    local, startup = kit / "local", kit / "startup"
    server = (startup / "fed_server.json").is_file()
    if not server and not (startup / "fed_client.json").is_file():
        raise ConfigError(f"{kit} is no kit of a FLARE server or site: startup/fed_client.json is not there")
    resources = complete(_read(local, RESOURCES), server=server, methods=methods, **settings)
    written = [write_json(local / RESOURCES, resources)]
    if not (local / AUTHORIZATION).is_file():
        written.append(write_json(local / AUTHORIZATION, without_byoc(_read(local, AUTHORIZATION))))
    if server and end_jobs_soon(startup):
        written.append(startup / "sub_start.sh")
    if not server and not (local / PRIVACY).is_file():
        written.append(write_json(local / PRIVACY, site_policy(methods)))
    return written


def _read(local: Path, name: str) -> dict[str, Any]:
    return read_json(local / name if (local / name).is_file() else local / f"{name}.default")


def _set(components: list[dict[str, Any]], identity: str, **values: Any) -> None:
    component = next((one for one in components if one.get("id") == identity), None)
    if component is None:
        components.append(component := {"id": identity})
    component.update(values)


def _is_class(path: str) -> bool:
    parts = path.split(".")
    return len(parts) > 2 and all(part.isidentifier() for part in parts) and parts[-1][:1].isupper()


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m fedtar_flare.provision.kit KIT``."""
    parser = argparse.ArgumentParser(
        prog="python -m fedtar_flare.provision.kit",
        description="Put this plugin's classes, launcher and site policy into a FLARE kit that was made without them.",
    )
    parser.add_argument("kit", type=Path, help="folder of the kit, with local/ and startup/")
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        metavar="NAME",
        help=f"whose jobs may run here; may be repeated (default all: {', '.join(METHODS)})",
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that jobs may use here (default 0)")
    parser.add_argument("--gpu-memory", type=float, default=0, help="GiB of each")
    arguments = parser.parse_args(argv)
    try:
        written = complete_kit(arguments.kit, arguments.method, gpus=arguments.gpus, gpu_memory=arguments.gpu_memory)
    except FedTARError as error:
        print(error, file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
