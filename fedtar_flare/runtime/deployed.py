"""A job as it lies in a folder, exported or put at a site by FLARE, read back into what it asks of a site."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, FedTARError, plain
from fedtar_flare.core.files import read_json
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.requirements import describe, requirements
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.admission import breaches
from fedtar_flare.site.approval import CLIENT_CONFIG, SERVER_CONFIG, digest_of, executor_entry, mappings, only
from fedtar_flare.site.bounds import Bounds
from fedtar_flare.site.policy import SERVER_CLASSES, SITE_CLASSES

META = "meta.json"
_CLASS = ("path", "class_path", "name")
"""Keys by which FLARE's configurations name a class."""


@dataclass(frozen=True)
class DeployedJob:
    """A job of this package."""

    name: str
    settings: Mapping[str, Any]
    """What it gives the executor and the controller that differs from the defaults."""
    submitter: str
    """As the server says; empty for a job that was not submitted."""
    executor: SiteExecutor
    controller: FederatedController
    digest: str
    foreign: tuple[str, ...]
    """Classes that it builds at a site and that are not of its method: FLARE's own, or others."""
    brings_code: bool
    """Whether it has a ``custom`` folder."""

    @property
    def contract(self) -> Contract:
        return self.executor.contract

    def breaches(self, bounds: Bounds) -> list[str]:
        """Which of a site's bounds it is beyond (see :func:`fedtar_flare.site.admission.breaches`)."""
        config = self.controller.config
        return breaches(self.executor.strategy.request(config.num_rounds, config.time_steps), bounds)

    def describe(self) -> str:
        """What it asks of a site and what will leave, as text for people."""
        lines = [
            describe(requirements(self)),
            "",
            f"settings that are not defaults: {json.dumps(self.settings)}",
            f"what else it builds here: {', '.join(self.foreign) or 'nothing'}",
        ]
        if self.submitter:
            lines.append(f"submitted by {self.submitter}, as the server says")
        if self.brings_code:
            lines.append(
                "IT HAS A 'custom' FOLDER: it may bring code of its own, and this site's list of classes is off"
            )
        return "\n".join(map(plain, "\n".join(lines).split("\n")))


def app_of(job: Path, site: str = "") -> Path:
    """The one app within a job's folder that goes to a site, or the folder itself; ConfigError unless there is one."""
    if (job / CLIENT_CONFIG).is_file():
        return job
    found = [app for app in sorted(job.iterdir()) if (app / CLIENT_CONFIG).is_file()] if job.is_dir() else []
    if len(found) > 1:
        names = read_json(job / META).get("deploy_map")
        names = names if isinstance(names, dict) else {}
        found = [app for app in found if {site, "@ALL"} & set(map(str, names.get(app.name) or ()))]
    if len(found) != 1:
        raise ConfigError(f"{job}: {len(found)} apps of a job for this site; one folder must have {CLIENT_CONFIG}")
    return found[0]


def read_job(app: Path) -> DeployedJob:
    """Read an app, importing no class but those of installed methods; ConfigError if it is none of this package's."""
    site = read_json(app / CLIENT_CONFIG)
    meta = read_json(app.parent / META) if (app.parent / META).is_file() else {}
    entry, workflow = executor_entry(app), only(app / SERVER_CONFIG, "workflows")
    others = [entry for key in ("task_data_filters", "task_result_filters") for entry in mappings(site, key, app)]
    filters = [one for other in others for one in mappings(other, "filters", app)]
    built = [entry, *mappings(site, "components", app), *filters]
    paths = dict.fromkeys(plain(path) for component in built for path in _classes(component))
    return DeployedJob(
        name=plain(str(meta.get("name") or app.parent.name)),
        settings={part: one.get("args") or {} for part, one in (("site", entry), ("server", workflow))},
        submitter=plain(str(meta.get("submitter_name") or "")),
        executor=executor_of(app),
        controller=_build(workflow, SERVER_CLASSES, FederatedController, app),
        digest=digest_of(app),
        foreign=tuple(path for path in paths if path not in SITE_CLASSES),
        brings_code=(app / "custom").is_dir(),
    )


def executor_of(app: Path) -> SiteExecutor:
    """The executor of an app; raises ConfigError as :func:`read_job` does."""
    built: SiteExecutor = _build(executor_entry(app), SITE_CLASSES, SiteExecutor, app)
    return built


def _classes(component: Mapping[str, Any]) -> Iterator[str]:
    """The class of a component, and those that FLARE builds for its arguments."""
    yield str(next((component[key] for key in _CLASS if key in component), None))
    given = component.get("args")
    for value in given.values() if isinstance(given, Mapping) else ():
        if isinstance(value, Mapping) and not value.keys().isdisjoint(_CLASS):
            yield from _classes(value)


def _build(entry: Mapping[str, Any], classes: Sequence[str], base: type, app: Path) -> Any:
    """The component that a configuration names, if it is one of this package's."""
    path = str(entry.get("path"))
    if path not in classes:
        raise ConfigError(f"{app}: '{path:.80}' is no class of fedtar_flare that a job may build here")
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    if not issubclass(kind, base):
        raise ConfigError(f"{app}: '{path:.80}' is no {base.__name__}")
    try:
        built = kind(**(entry.get("args") or {}))
        _ = built.strategy  # a method that is not installed, or a wrong setting, is said here
        return built
    except FedTARError:
        raise
    except Exception as error:  # arguments of any form
        raise ConfigError(f"{app}: {name}: {error}") from error
