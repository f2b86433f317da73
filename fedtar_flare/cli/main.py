"""Entry point of ``fedtar``: runs one command and turns errors into one readable message and an exit code."""

import argparse
import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fedtar_flare.cli import data, jobs, kits, reference, reports, site
from fedtar_flare.cli.commands import Parser
from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.text import plain
from fedtar_flare.version import __version__

GROUPS = {
    "run a federation on this machine": ("simulate", "compare", "evaluate", "methods", "settings", "export", "report"),
    "use and prepare models": ("generate", "serve", "score", "read", "labeler", "warmstart", "push"),
    "a site's data": ("init", "data"),
    "a site in a federation": ("doctor", "site", "audit", "health", "renew"),
    "admin of a federation": ("status", "watch", "resume", "continue", "forget", "release"),
}
"""Commands as the help shows them."""

EXAMPLES = """\
examples:
  fedtar simulate -n 2 -r 1                     two synthetic hospitals, one round of FedTAR
  fedtar simulate --method fedavg --set training.lr=1e-3
  fedtar settings fedavg                        what can be set, and what it means
  fedtar data check manifest.csv                which studies can be used, and why others cannot

exit codes: 0 done, 1 failed, 2 wrong use (an option, a setting or a site file that does not fit), 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = Parser(
        prog="fedtar",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="Federated learning of longitudinal medical report generation on NVIDIA FLARE.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fedtar_flare {__version__}")
    shown: dict[str, Any] = {"metavar": "COMMAND", "help": argparse.SUPPRESS}
    commands = top.add_subparsers(dest="command", prog="fedtar", required=True, **shown)
    for part in (jobs, reference, reports, data, site, kits):
        part.add_commands(commands)
    listed = {action.dest: action for action in commands._choices_actions}
    for title, names in GROUPS.items():
        top.add_argument_group(title)._group_actions.extend(listed[name] for name in names)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Without a command it is the help."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        import argcomplete

        argcomplete.autocomplete(parser())
    arguments = parser().parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    command = " ".join(["fedtar", arguments.command, *filter(None, [getattr(arguments, "subcommand", None)])])
    return exit_code(command, lambda: arguments.run(arguments))


def entry() -> None:
    """Run as the installed command, and end without freeing each object, which takes 1.5 s once torch is loaded."""
    code = main()
    if threading.active_count() == 1:  # else Python waits for the others
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_code(command: str, run: Callable[[], int | None]) -> int:
    """Run a command; an error of this package becomes a message on standard error that names the command."""
    try:
        code = int(run() or 0)
        sys.stdout.flush()
        return code
    except FedTARError as error:
        lines = (plain(line) for line in str(error).splitlines())  # it may quote what others have named
        print("\n".join([f"{command}: {next(lines, '')}", *lines]), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # "| head" has read enough; Python would say so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # such as a file that is to be written below a file, or on a full disk
        print(plain(f"{command}: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"{command}: interrupted{interrupt}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    entry()
