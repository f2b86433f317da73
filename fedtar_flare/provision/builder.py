"""``KitBuilder``: completes FLARE's kits for this plugin when ``nvflare provision`` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import ProvFileName
from nvflare.lighter.ctx import ProvisionContext
from nvflare.lighter.entity import Project
from nvflare.lighter.spec import Builder

from fedtar_flare.errors import ConfigError
from fedtar_flare.files import read_json, write_json
from fedtar_flare.provision.kit import complete, end_jobs_soon, site_policy, without_byoc
from fedtar_flare.site.policy import PRIVACY, site_classes


class KitBuilder(Builder):
    """Listed in ``project.yml`` after ``StaticFileBuilder`` and before ``SignatureBuilder``.

    The kits get the classes of the methods' jobs on the allow-list (enforced), the server's storage inside its kit, the
    supervised process launcher, the site policy ``local/privacy.json`` with the outbound guard, no log streaming from
    sites, and a policy under which a lead may not bring code. Raises ConfigError for a setting that is not allowed or a
    site that the project does not have.

    Args:
        methods: whose jobs may run; empty: all that are installed where the kits are made.
        extra_classes: full class paths that jobs may use beside those of the methods.
        extra_names: regular expressions; a base-model parameter may leave a site whole only if one matches its whole
            name.
        filters: result filters of every site, such as differential privacy, that run before the guard, in FLARE's form
            (``path``, ``args``).
        lead_byoc: whether a lead may submit a job with code of its own (FLARE's default; not ours).
        max_restarts: of a site's job process that a signal ended.
        gpus: site name to ``{"count": 1, "memory": 40}`` (GiB), which a job asks for with its ``resource_spec``. Other
            sites manage none (a job then uses what the site file says).
    """

    def __init__(
        self,
        methods: Sequence[str] = (),
        extra_classes: Sequence[str] = (),
        extra_names: Sequence[str] = (),
        filters: Sequence[Mapping[str, Any]] = (),
        lead_byoc: bool = False,
        max_restarts: int = 3,
        gpus: Mapping[str, Mapping[str, float]] | None = None,
    ):
        lists = {"methods": methods, "extra_classes": extra_classes, "extra_names": extra_names, "filters": filters}
        for name, value in lists.items():
            if isinstance(value, str | Mapping):
                raise ConfigError(f"KitBuilder: {name} must be a list, not {value!r}")
        site_classes(methods)  # refuses a method that is not installed
        for site, entry in (gpus or {}).items():
            if set(entry) - {"count", "memory"}:
                raise ConfigError(f"KitBuilder: gpus of '{site}' are {{count: ..., memory: ...}}, not {dict(entry)}")
        self.methods, self.extra_classes, self.extra_names, self.filters = methods, extra_classes, extra_names, filters
        self.lead_byoc, self.max_restarts, self.gpus = lead_byoc, max_restarts, dict(gpus or {})

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
                methods=self.methods,
                extra_classes=self.extra_classes,
                gpus=int(gpus.get("count", 0)),
                gpu_memory=gpus.get("memory", 0),
                max_restarts=self.max_restarts,
            )
            write_json(resources, content)
            if not self.lead_byoc:
                policy = local / ProvFileName.AUTHORIZATION_JSON_DEFAULT
                write_json(policy, without_byoc(read_json(policy)))
            if is_server:
                end_jobs_soon(Path(ctx.get_kit_dir(participant)))
            else:
                write_json(local / PRIVACY, site_policy(self.methods, self.extra_names, self.filters))
