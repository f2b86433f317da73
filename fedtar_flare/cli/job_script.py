"""``run_job``: what the ``job.py`` of an exported job calls, in the simulator or in a federation of real processes."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fedtar_flare.cli.commands import Parser, add_sites
from fedtar_flare.cli.main import exit_code
from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import write_text

if TYPE_CHECKING:
    from fedtar_flare.runtime.recipe import MethodRecipe

ADMIN = "admin@hub.org"
LIGHTER = "nvflare.lighter.impl"


def run_job(recipe: MethodRecipe, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a recipe where the command line says, and end the process with the exit codes of ``fedtar``.

    ``--env sim`` (the default) is FLARE's simulator, ``poc`` a server and hospitals as processes of their own on this
    machine, ``prod`` a running federation, to which the job is submitted. FLARE's ``--export`` writes the job instead.
    """
    parser = Parser(
        description=f"Run the job '{recipe.name}'. With FLARE's own --export --export-dir FOLDER, write it instead."
    )
    parser.add_argument(
        "--env",
        choices=("sim", "poc", "prod"),
        default="sim",
        help="sim: FLARE's simulator (default); poc: server and hospitals as processes of their own on this machine, "
        "over mutual TLS; prod: submit it to a running federation",
    )
    add_sites(parser)
    parser.add_argument("-w", "--workspace", default="simulator_workspace", help="sim: folder of the run, made anew")
    parser.add_argument("--kit", type=Path, help="prod: startup kit of the lead or an administrator")
    arguments = parser.parse_args(argv)
    sys.exit(exit_code("job.py", lambda: _run(recipe, arguments)))


def _run(recipe: MethodRecipe, arguments: argparse.Namespace) -> None:
    from fedtar_flare.runtime.simulation import simulate, site_names

    names = site_names(arguments.sites)
    if arguments.env == "sim":
        simulate(recipe, names, workspace=arguments.workspace)
        return
    try:
        if arguments.env == "poc":
            _run_on_this_machine(recipe, names)
        else:
            _submit(recipe, arguments.kit)
    except FedTARError:
        raise
    except Exception as error:  # FLARE's environments raise a dozen kinds; each has its reason as its text
        raise FedTARError(f"FLARE could not run the job: {error or type(error).__name__}") from error


def _submit(recipe: MethodRecipe, kit: Path | None) -> None:
    from nvflare.recipe.prod_env import ProdEnv

    from fedtar_flare.provision.status import CONNECT_SECONDS, admin_of

    if kit is None:
        raise ConfigError("--env prod needs the startup kit of somebody who may submit jobs: --kit FOLDER")
    run = recipe.execute(ProdEnv(str(kit.resolve()), login_timeout=CONNECT_SECONDS, username=admin_of(kit)))
    print(f"follow it: fedtar watch {run.get_job_id()} --kit {kit}")


def _run_on_this_machine(recipe: MethodRecipe, names: Sequence[str]) -> None:
    """FLARE's proof of concept with this package's kits, on synthetic data unless FEDTAR_SITES says otherwise."""
    import yaml
    from nvflare.recipe.poc_env import PocEnv

    from fedtar_flare.reporting.run import find_run
    from fedtar_flare.site.site_file import SITES_VARIABLE, sites_folder

    with tempfile.TemporaryDirectory() as folder:
        if sites_folder() is None:
            for name in names:
                write_text(Path(folder) / f"{name}.yaml", "source: synthetic\n")
        os.environ[SITES_VARIABLE] = str((sites_folder() or Path(folder)).resolve())
        project = write_text(Path(folder) / "project.yml", yaml.safe_dump(_project(recipe, names)))
        environment = PocEnv(
            num_clients=len(names), project_conf_path=str(project), username=ADMIN, extra={"login_timeout": 60.0}
        )
        try:
            run = recipe.execute(environment)
            results = run.get_result(clean_up=False)
        finally:
            environment.stop()
    if results is None or run.get_status() != "FINISHED:COMPLETED":
        raise FedTARError(f"the job ended as {run.get_status()}; logs of its processes: {environment.poc_workspace}")
    print(f"report: {find_run(Path(results)) / 'report.html'}")


def _project(recipe: MethodRecipe, names: Sequence[str]) -> dict[str, object]:
    """A project file of ``nvflare provision``: one server, these sites, and kits that allow this job."""
    from fedtar_flare.provision.builder import KitBuilder

    kits = {"methods": [recipe.contract.method], "extra_names": list(recipe.executor.strategy.settings.lora.exchange)}
    return {
        "api_version": 3,
        "name": "fedtar_poc",
        "participants": [
            {"name": "localhost", "type": "server", "org": "hub", "fed_learn_port": 8002},
            {"name": ADMIN, "type": "admin", "org": "hub", "role": "project_admin"},
            *({"name": name, "type": "client", "org": "hub"} for name in names),
        ],
        "builders": [
            {"path": f"{LIGHTER}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{LIGHTER}.static_file.StaticFileBuilder", "args": {"config_folder": "config", "scheme": "grpc"}},
            {"path": f"{KitBuilder.__module__}.{KitBuilder.__name__}", "args": kits},
            {"path": f"{LIGHTER}.cert.CertBuilder"},
            {"path": f"{LIGHTER}.signature.SignatureBuilder"},
        ],
    }
