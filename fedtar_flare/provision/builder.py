"""``KitBuilder``: completes FLARE's kits for this plugin when ``nvflare provision`` makes them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import ProvFileName
from nvflare.lighter.ctx import ProvisionContext
from nvflare.lighter.entity import Project
from nvflare.lighter.spec import Builder

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import read_json, write_json
from fedtar_flare.provision.kit import complete, log_lines, prepare_start, site_policy
from fedtar_flare.registry import contract_of, default_names
from fedtar_flare.site.policy import PRIVACY, rights


class KitBuilder(Builder):
    """Listed in ``project.yml`` after ``StaticFileBuilder`` and before ``SignatureBuilder``.

    The kits get the classes of this package's jobs on the allow-list (enforced), the server's storage inside its kit,
    the supervised process launcher, the site policy ``local/privacy.json`` with the guard, no log streaming from
    sites, and a policy under which no administrator reads a site's files or brings code; relays look at what they pass
    on. :class:`ConfigError` for a setting that is not allowed, or a method or site that is not there.

    Parameters
    ----------
    methods : sequence of str, optional
        Whose jobs may run, which the kits list by name (empty: none). None: those that come with this package and have
        no caution (not ``scaffold``), whatever else is installed where the kits are made.
    extra_classes : sequence of str
        Full class paths that jobs may use besides those of this package.
    extra_names : sequence of str
        Globs (:mod:`fedtar_flare.core.settings`): the base-model parameters that may leave a site whole.
    filters : sequence of Mapping
        Result filters of every site, such as differential privacy, that run before the guard, in FLARE's form
        (``path``, ``args``).
    flare_classes : bool
        Whether FLARE's own list of classes stays allowed, for jobs of other plugins.
    lead_byoc : bool
        Whether a lead may submit a job with code of its own (FLARE's default; not ours).
    max_restarts : int
        Of a site's job process that a signal ended.
    gpus : Mapping, optional
        Site name to ``{"count": 1, "memory": 40}`` (GiB), which a job asks for with its ``resource_spec``. Other sites
        manage none (a job then uses what the site file says).
    """

    def __init__(
        self,
        methods: Sequence[str] | None = None,
        extra_classes: Sequence[str] = (),
        extra_names: Sequence[str] = (),
        filters: Sequence[Mapping[str, Any]] = (),
        flare_classes: bool = False,
        lead_byoc: bool = False,
        max_restarts: int = 3,
        gpus: Mapping[str, Mapping[str, float]] | None = None,
    ):
        methods = default_names() if methods is None else methods
        lists = {"methods": methods, "extra_classes": extra_classes, "extra_names": extra_names, "filters": filters}
        for name, value in lists.items():
            if isinstance(value, str | Mapping):
                raise ConfigError(f"KitBuilder: {name} must be a list, not {value!r}")
        for name in methods:
            contract_of(name)  # refuses a method that is not installed
        for site, entry in (gpus or {}).items():
            if set(entry) - {"count", "memory"}:
                raise ConfigError(f"KitBuilder: gpus of '{site}' are {{count: ..., memory: ...}}, not {dict(entry)}")
        self.methods, self.extra_classes, self.extra_names, self.filters = methods, extra_classes, extra_names, filters
        self.flare_classes, self.lead_byoc = flare_classes, lead_byoc
        self.max_restarts, self.gpus = max_restarts, dict(gpus or {})

    def initialize(self, project: Project, ctx: ProvisionContext) -> None:
        """Have FLARE, which writes for everybody, write kits and the project's root key for their owner alone."""
        self._umask = os.umask(0o077)
        for folder in (Path(ctx.get_wip_dir()), Path(ctx.get_state_dir())):
            folder.chmod(0o700)  # made before
        for file in Path(ctx.get_state_dir()).iterdir():
            file.chmod(0o600)  # of a project that was provisioned without this builder

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        unknown = sorted(set(self.gpus) - {client.name for client in project.get_clients()})
        if unknown:
            raise ConfigError(f"KitBuilder: gpus name '{unknown[0]}', which is no client of the project")
        server = project.get_server()
        for participant in filter(None, [server, *project.get_clients()]):
            is_server = participant is server
            local = Path(ctx.get_local_dir(participant))
            gpus = self.gpus.get(participant.name, {})
            resources = local / ProvFileName.RESOURCES_JSON_DEFAULT
            if not resources.is_file():
                raise ConfigError("KitBuilder must be listed after StaticFileBuilder in project.yml")
            content = complete(
                read_json(resources),
                server=is_server,
                extra_classes=self.extra_classes,
                gpus=int(gpus.get("count", 0)),
                gpu_memory=gpus.get("memory", 0),
                max_restarts=self.max_restarts,
                byoc=self.lead_byoc,
                flare_classes=self.flare_classes,
                sites=[client.name for client in project.get_clients()],
            )
            write_json(resources, content)
            logs = local / ProvFileName.LOG_CONFIG_DEFAULT
            write_json(logs, log_lines(read_json(logs)))
            write_json(local / ProvFileName.AUTHORIZATION_JSON_DEFAULT, rights(self.lead_byoc))
            prepare_start(Path(ctx.get_kit_dir(participant)), server=is_server)
            if not is_server:
                write_json(local / PRIVACY, site_policy(self.methods, self.extra_names, self.filters))
        for relay in project.get_relays():
            prepare_start(Path(ctx.get_kit_dir(relay)))

    def finalize(self, project: Project, ctx: ProvisionContext) -> None:
        os.umask(self._umask)
