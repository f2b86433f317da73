"""``run_job``: what the ``job.py`` of an exported job calls, in the simulator or in a running federation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fedtar_flare.cli.commands import Parser, add_sites
from fedtar_flare.cli.main import exit_code
from fedtar_flare.core.errors import ConfigError, FedTARError

if TYPE_CHECKING:
    from fedtar_flare.runtime.recipe import MethodRecipe

__all__ = ["run_job"]


def run_job(recipe: MethodRecipe, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a recipe where the command line says, and end the process with the exit codes of ``fedtar``.

    ``--env sim`` (the default) is FLARE's simulator; ``--env prod`` submits the job to a running federation. FLARE's
    own ``--export`` writes the job's folder instead.

    Parameters
    ----------
    recipe : MethodRecipe
        The job.
    argv : sequence of str, optional
        Command line without the program's name; default ``sys.argv[1:]``.
    """
    about = f"Run the job '{recipe.name}'. With FLARE's own --export --export-dir FOLDER, write it instead."
    parser = Parser(description=about)
    where = "sim: FLARE's simulator (default); prod: submit it to a running federation"
    parser.add_argument("--env", choices=("sim", "prod"), default="sim", help=where)
    add_sites(parser)
    parser.add_argument("-w", "--workspace", default="simulator_workspace", help="sim: folder of the run, made anew")
    parser.add_argument("--kit", type=Path, help="prod: startup kit of the lead or an administrator")
    arguments = parser.parse_args(argv)
    sys.exit(exit_code("job.py", lambda: _run(recipe, arguments)))


def _run(recipe: MethodRecipe, arguments: argparse.Namespace) -> None:
    if arguments.env == "sim":
        from fedtar_flare.runtime.simulation import simulate, site_names

        simulate(recipe, site_names(arguments.sites), workspace=arguments.workspace)
        return
    from nvflare.recipe.prod_env import ProdEnv

    from fedtar_flare.provision.status import CONNECT_SECONDS, admin_of, open_session

    if (kit := arguments.kit) is None:
        raise ConfigError("--env prod needs the startup kit of somebody who may submit jobs: --kit FOLDER")
    user = admin_of(kit)
    with open_session(kit) as session:
        connected = sorted(client.name for client in session.get_system_info().client_info)
    print(f"connected: {', '.join(connected) or 'no hospital'} (one that connects after the job's start is not in it)")
    try:
        run = recipe.execute(ProdEnv(str(kit.resolve()), login_timeout=CONNECT_SECONDS, username=user))
    except FedTARError:
        raise
    except Exception as error:  # FLARE's environments raise a dozen kinds; each has its reason as its text
        raise FedTARError(f"FLARE could not run the job: {error or type(error).__name__}") from error
    print(f"follow it: fedtar watch {run.get_job_id()} --kit {kit}")
