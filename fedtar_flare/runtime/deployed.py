"""Reads a job's folder, exported or deployed at a site by FLARE, back into what the job asks of a site."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import read_json
from fedtar_flare.core.text import plain
from fedtar_flare.protocol.contract import Contract
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.requirements import describe
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.admission import breaches
from fedtar_flare.site.approval import CLIENT_CONFIG, SERVER_CONFIG, digest_of, executor_entry, mappings, only
from fedtar_flare.site.policy import SERVER_CLASSES, SITE_CLASSES
from fedtar_flare.site.site_file import Bounds

META = "meta.json"
_CLASS = ("path", "class_path", "name")
"""Keys by which FLARE's configurations name a class."""


@dataclass(frozen=True)
class DeployedJob:
    """A job of this package."""

    name: str
    settings: Mapping[str, Any]
    """Arguments of the executor (``site``) and the controller (``server``) that differ from the defaults."""
    submitter: str
    """As the server reports it; empty for a job that was not submitted."""
    executor: SiteExecutor
    controller: FederatedController
    digest: str
    """Of the files that reach a site; an approval is for one digest."""
    foreign: tuple[str, ...]
    """Classes that it builds at a site and that are not of its method: FLARE's own, or others."""
    brings_code: bool
    """Whether it has a ``custom`` folder."""

    @property
    def contract(self) -> Contract:
        """Contract of its method."""
        return self.executor.contract

    def breaches(self, bounds: Bounds) -> list[str]:
        """List where the job is beyond a site's bounds."""
        config = self.controller.config
        return breaches(self.executor.strategy.request(config.num_rounds, config.time_steps), bounds)

    def describe(self) -> str:
        """Describe for people what the job asks of a site and what will leave."""
        lines = [
            describe(self),
            "",
            f"settings that are not defaults: {json.dumps(self.settings)}",
            f"what else it builds here: {', '.join(self.foreign) or 'nothing'}",
        ]
        if self.submitter:
            lines.append(f"submitted by {self.submitter}, as the server says")
        if self.brings_code:
            lines.append("IT HAS A 'custom' FOLDER: it may bring code, and this site's list of classes is off")
        return "\n".join(map(plain, "\n".join(lines).split("\n")))


def app_of(job: Path, site: str = "") -> Path:
    """Find the app of a job that goes to a site."""
    if (job / CLIENT_CONFIG).is_file():
        return job
    apps = [app for app in sorted(job.iterdir()) if (app / CLIENT_CONFIG).is_file()] if job.is_dir() else []
    if len(apps) > 1:
        names = read_json(job / META).get("deploy_map")
        names = names if isinstance(names, dict) else {}
        apps = [app for app in apps if {site, "@ALL"} & set(map(str, names.get(app.name) or ()))]
    if len(apps) != 1:
        raise ConfigError(f"{job}: {len(apps)} apps of a job for this site; one folder must have {CLIENT_CONFIG}")
    return apps[0]


def read_job(app: Path) -> DeployedJob:
    """Read an app, importing no class but those of installed methods."""
    site = read_json(app / CLIENT_CONFIG)
    meta = read_json(app.parent / META) if (app.parent / META).is_file() else {}
    entry, workflow = executor_entry(app), only(app / SERVER_CONFIG, "workflows")
    others = [entry for key in ("task_data_filters", "task_result_filters") for entry in mappings(site, key, app)]
    filters = [part for chain in others for part in mappings(chain, "filters", app)]
    built = [entry, *mappings(site, "components", app), *filters]
    paths = dict.fromkeys(plain(path) for component in built for path in _classes(component))
    return DeployedJob(
        name=plain(str(meta.get("name") or app.parent.name)),
        settings={"site": entry.get("args") or {}, "server": workflow.get("args") or {}},
        submitter=plain(str(meta.get("submitter_name") or "")),
        executor=executor_of(app),
        controller=_build(workflow, SERVER_CLASSES, FederatedController, app),
        digest=digest_of(app),
        foreign=tuple(path for path in paths if path not in SITE_CLASSES),
        brings_code=(app / "custom").is_dir(),
    )


def executor_of(app: Path) -> SiteExecutor:
    """The executor of an app; raises ConfigError as :func:`read_job` does."""
    return _build(executor_entry(app), SITE_CLASSES, SiteExecutor, app)


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
        _ = built.strategy  # a method that is not installed, or a wrong setting, fails here
        return built
    except FedTARError:
        raise
    except Exception as error:  # arguments of any form
        raise ConfigError(f"{app}: {name}: {error}") from error
