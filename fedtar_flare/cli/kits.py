"""``fedtar doctor``, ``health`` and ``renew``: whether all is well with a kit, and its new certificate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedtar_flare.cli.commands import Commands, add_command, given, show
from fedtar_flare.core.files import write_text

COLOURS = {"OK": "\033[32m", "WARN": "\033[33m", "FAIL": "\033[31m"}


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    text = "check everything that a site needs: packages, disk, data, policy, certificates, the way to the server"
    command = add_command(commands, doctor, text)
    command.add_argument("--kit", type=Path, help="the site's startup kit; without it, the environment alone")
    command.add_argument("--site-file", type=Path, help="another site file than the kit's local/fedtar.yaml")
    command.add_argument("--time-steps", type=int, default=3, help="time steps of the job (default 3)")
    command.add_argument("--prometheus", type=Path, metavar="FILE", help="also write each status for Prometheus")

    command = add_command(commands, health, "whether a site or the server is ready, or alive: for probes")
    command.add_argument("--kit", type=Path, default=Path(), help="its startup kit (default: this folder)")
    command.add_argument("--live", action="store_true", help="alive is enough")
    within = "a site is ready if the server answered within so many (default 14)"
    command.add_argument("--within", type=float, default=14.0, metavar="SECONDS", help=within)

    command = add_command(commands, renew, "put a new certificate into a kit, which otherwise stays as it is")
    command.add_argument("new", type=Path, help="the new kit, or the archive that 'nvflare cert approve' wrote")
    command.add_argument("--kit", type=Path, default=Path(), help="the kit to be renewed (default: this folder)")
    command.add_argument("--key", type=Path, dest="key_file", metavar="FILE", help="of the archive: NAME/NAME.key")


def doctor(arguments: argparse.Namespace) -> int:
    """Check a site: one line each, OK, WARN or FAIL, with the cure.

    Nothing is changed and no data is sent. Exit code 1 when anything fails.
    """
    from fedtar_flare.site.context import kit_of
    from fedtar_flare.site.doctor import diagnose, metrics

    findings = diagnose(arguments.kit, arguments.site_file, arguments.time_steps)
    if arguments.prometheus:
        write_text(arguments.prometheus, metrics(findings, kit_of(arguments.kit) if arguments.kit else None))
    lines, statuses = [], [finding.status for finding in findings]
    for finding in findings:
        mark = f"{COLOURS[finding.status]}{finding.status:4}\033[0m" if sys.stdout.isatty() else f"{finding.status:4}"
        lines.append(f"{mark}  {finding.check}: {finding.text}")
        lines += [f"      -> {finding.cure}"] if finding.cure else []
    failed, doubtful = statuses.count("FAIL"), statuses.count("WARN")
    lines.append(f"{failed} failed, {doubtful} to look at, of {len(findings)} checks")
    show(arguments, [vars(finding) for finding in findings], *lines)
    return int(failed > 0)


def health(arguments: argparse.Namespace) -> int:
    """Say whether the site or server of a kit is ready; exit code 1 if it is not. A site is ready while the server has
    answered a heartbeat, which leaves every 10 s, lately enough (--within), and alive while its process goes on sending
    them, also to a server that is away. A server is either while it takes a TLS connection at its port. Ask on the
    machine on which it runs.
    """
    from fedtar_flare.provision.health import kit_health

    healthy, text = kit_health(**given(arguments, "kit", "live", "within"))
    show(arguments, {"healthy": healthy, "reason": text}, text)
    return int(not healthy)


def renew(arguments: argparse.Namespace) -> None:
    """Put a participant's new certificate and private key in the place of the ones that end soon. Everything else
    stays: policy, site file, state, approvals, audit, privacy ledger. Refused unless the certificate has the kit's
    root, name, organisation and role, is valid now, ends later, and fits the key. A running process goes on with the
    one before until it is started again.
    """
    from fedtar_flare.provision.renewal import renew

    ends = f"{renew(**given(arguments, 'kit', 'new', 'key_file')):%Y-%m-%d}"
    again = "start it again when no job runs, and delete what the new key came in"
    show(arguments, {"valid_until": ends}, f"{arguments.kit}: valid until {ends}; {again}")
