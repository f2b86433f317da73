"""``fedtar site``, ``audit`` and ``doctor``: what a hospital's staff does with its own state."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fedtar_flare.cli import approval
from fedtar_flare.cli.commands import Commands, add_command, add_group, add_place, given
from fedtar_flare.reporting.format import plain

DECISIONS = {
    "pause": (
        "answer no task until 'fedtar site join'",
        "The site abstains at every task from now on, also in a job that runs: what it is computing is thrown away and "
        "the job goes on without it.",
        "paused: the site abstains at every task until 'fedtar site join'",
    ),
    "leave": (
        "decline every task, of this job and of later ones",
        "The site declines every task from now on. What it sent before is part of the shared model and stays there. "
        "'fedtar site purge' deletes what is kept here.",
        "left: the site declines every task until 'fedtar site join'",
    ),
    "join": (
        "take part again",
        "Take part again after 'pause' or 'leave': at the next task of a running job, or at its next round where the "
        "site missed the handshake.",
        "taking part",
    ),
}
"""Summary, description, and what is printed."""
COLOURS = {"OK": "\033[32m", "WARN": "\033[33m", "FAIL": "\033[31m"}
HEAD = ("time", "site", "method", "task", "round", "step", "outcome", "tensors", "bytes", "norm", "header")


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    group = add_group(commands, "site", "look after a site's own state")
    for name, (summary, text, _) in DECISIONS.items():
        command = group.add_parser(name, help=summary, description=text)
        add_place(command)
        command.set_defaults(run=decide)
    approval.add_commands(group)

    command = add_command(
        group, purge, "delete what the site keeps of a run or a patient; shows first, deletes with --yes"
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", metavar="RUN_ID", dest="run_id", help="state of one run (run ids: see 'fedtar audit')")
    what.add_argument("--patient", metavar="ID", help="one patient's prepared images, and all example pages")
    what.add_argument(
        "--older-than", metavar="DAYS", type=float, help="state, folders of jobs and audit that nobody wrote to since"
    )
    what.add_argument("--retention", action="store_true", help="what is older than the site file's retention_days")
    what.add_argument(
        "--all", action="store_true", help="state of all runs, all folders of jobs, all prepared images, the audit"
    )
    what.add_argument("--cache", action="store_true", help="all prepared images; they are made anew when needed")
    command.add_argument("--yes", action="store_true", help="delete; without it nothing is touched")
    add_place(command)
    command.add_argument("--site-file", type=Path, help="site file of a simulated site")
    command.add_argument("--json", action="store_true", help="print the plan as JSON")

    command = add_command(commands, audit, "what left a site: every message with its tensors, norms and header fields")
    command.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="a site's startup kit, its fedtar_state, or one audit file (default: the simulator's sites)",
    )
    command.add_argument("--tensors", action="store_true", help="list every tensor of every message")
    command.add_argument("--totals", action="store_true", help="print the totals alone")
    command.add_argument("--verify", action="store_true", help="follow each file's chain: has a line been changed?")
    command.add_argument("--json", action="store_true", help='print {"entries": [...], "totals": [...]}')

    command = add_command(
        commands,
        doctor,
        "check everything that a site needs: packages, disk, data, policy, certificates, the way to the server",
    )
    command.add_argument("--kit", type=Path, help="the site's startup kit; without it, the environment alone")
    command.add_argument("--site-file", type=Path, help="another site file than the kit's local/fedtar.yaml")
    command.add_argument("-T", "--time-steps", type=int, default=3, help="time steps of the job (default 3)")
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
    command.add_argument(
        "--prometheus", type=Path, metavar="FILE", help="also write each check's status for Prometheus' node exporter"
    )


def decide(arguments: argparse.Namespace) -> None:
    """Write the site's own decision to pause, leave or join."""
    from fedtar_flare.site.participation import Participation, decide
    from fedtar_flare.site.place import kit_of, simulated_records, state_of

    name = arguments.subcommand
    status = {"pause": Participation.PAUSED, "leave": Participation.LEFT, "join": Participation.TAKING_PART}
    records = simulated_records(arguments.simulated) if arguments.simulated else state_of(kit_of(arguments.kit))
    print(f"{DECISIONS[name][2]} ({decide(records, status[name])})")


def purge(arguments: argparse.Namespace) -> None:
    """Show what would be deleted at this site and what cannot be; with --yes, delete it.

    Without this command only superseded state of a running job is deleted (three rounds stay), and, where the site file
    says 'retention_days', once a day what is older. Run it while no job runs here.
    """
    from fedtar_flare.site import purge

    if arguments.simulated:
        place = purge.place_of_simulated(arguments.simulated, arguments.site_file)
    else:
        place = purge.place_of_kit(arguments.kit)
    what = given(arguments, "patient", "older_than", "retention", "cache")
    plan = purge.plan(place, run=arguments.run_id, everything=arguments.all, **what)
    if arguments.yes:
        plan.carry_out()
    if arguments.json:
        remove = [{"path": str(path), "what": what} for path, what in plan.remove]
        print(json.dumps({"deleted": arguments.yes, "remove": remove, "kept": plan.kept}))
        return
    done = "deleted" if arguments.yes else "would delete"
    print("\n".join(f"{done}: {what}: {path}" for path, what in plan.remove) or "nothing to delete")
    for line in plan.kept:
        print(f"stays: {line}")
    if plan.remove and not arguments.yes:
        print("Nothing was touched. Add --yes to delete.")


def audit(arguments: argparse.Namespace) -> int:
    """Print the site's audit: one line for each message that left, and the totals of each job. It holds names, shapes
    and norms, never a value of the data. With --verify, exit code 1 where a line was changed, left out or put in.
    """
    from fedtar_flare.site.audit import audit_files, read_audit, totals
    from fedtar_flare.site.place import home

    files = audit_files(arguments.folder or home())
    if arguments.verify:
        return _verify(files, arguments.json)
    entries = read_audit(files)
    sums = totals(entries)
    if arguments.json:
        print(json.dumps({"entries": entries, "totals": sums}))
        return 0
    if not arguments.totals:
        print("\n".join(_audit_lines(entries, arguments.tensors)) + "\n")
    for total in sums:
        print(
            f"{total['site']}, job {total['job']}, run {total['run']}: {total['messages']} messages "
            f"({total['refused']} refused, {total['errors']} errors), {total['tensors']} tensors, "
            f"{total['bytes'] / 1e6:.3f} MB; {total['streamed']} scalars streamed; last {total['last']}"
        )
    return 0


def _verify(files: list[Path], as_json: bool) -> int:
    """Print what the chain of each file says; 1 where one is broken."""
    from dataclasses import asdict

    from fedtar_flare.site.audit_file import verify

    found = [verify(file) for file in files]
    if as_json:
        print(json.dumps([asdict(one) | {"file": str(one.file)} for one in found]))
    for one in found if not as_json else ():
        earlier = f", {one.unchained} lines of an earlier release before them" if one.unchained else ""
        print(
            f"{'BROKEN' if one.problem else 'whole '}  {one.file}: {one.lines} lines{earlier}; last {one.digest}"
            + (f"\n        {one.problem}" if one.problem else "")
        )
    return int(any(one.problem for one in found))


def _audit_lines(entries: list[dict[str, Any]], with_tensors: bool) -> list[str]:
    """The table of all messages, on request each with its tensors below."""
    rows = [HEAD, *map(_audit_row, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, entry in zip(rows, [{}, *entries], strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for t in entry.get("tensors") or [] if with_tensors else []:
            shape = "x".join(map(str, t["shape"])) or "1"
            lines.append(
                f"    {plain(t['name'])}  {shape}  {t['dtype'].removeprefix('torch.')}  "
                f"{t['bytes']} bytes  norm {t['norm']:.4g}  {t.get('group') or 'no group of the contract'}"
                + ("  PERSONAL DATA" if t.get("personal") else "")
            )
    return lines


def _audit_row(entry: dict[str, Any]) -> tuple[str, ...]:
    known = {name: value for name, value in entry.items() if value is not None}
    status = known.get("status", "ok")
    header = [
        *known.get("numbers", ()),
        *known.get("fields", ()),
        *(f"OTHER: {name}" for name in known.get("other", ())),
    ]
    cells = known | {
        "outcome": known.get("outcome", "") + (f", {status}" if status != "ok" else ""),
        "tensors": len(known.get("tensors", ())) or "",
        "bytes": known.get("bytes") or "",
        "norm": f"{entry['norm']:.4g}" if known.get("norm") else "",
        "header": ", ".join([*header, *([f"({known['reason']})"] if known.get("reason") else [])]),
    }
    return tuple(plain(cells.get(name, "")) for name in HEAD)


def doctor(arguments: argparse.Namespace) -> int:
    """Check a site: one line each, OK, WARN or FAIL, with the cure.

    Nothing is changed and no data is sent. Exit code 1 when anything fails.
    """
    from dataclasses import asdict

    from fedtar_flare.site.doctor import FAIL, WARN, diagnose

    findings = diagnose(arguments.kit, arguments.site_file, arguments.time_steps)
    if arguments.prometheus:
        from fedtar_flare.site.doctor.prometheus import write
        from fedtar_flare.site.place import kit_of

        write(arguments.prometheus, findings, kit_of(arguments.kit) if arguments.kit else None)
    counts = {status: sum(finding.status == status for finding in findings) for status in (FAIL, WARN)}
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings]))
        return int(counts[FAIL] > 0)
    colour = sys.stdout.isatty()
    for finding in findings:
        mark = f"{COLOURS[finding.status]}{finding.status:4}\033[0m" if colour else f"{finding.status:4}"
        print(f"{mark}  {finding.check}: {finding.text}")
        if finding.cure:
            print(f"      -> {finding.cure}")
    print(f"{counts[FAIL]} failed, {counts[WARN]} to look at, of {len(findings)} checks")
    return int(counts[FAIL] > 0)
