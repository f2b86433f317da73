"""``fedtar audit``: what left this site."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedtar_flare.cli.commands import Commands


def add_parser(commands: Commands) -> None:
    """Add the command."""
    command = commands.add_parser(
        "audit",
        help="what left a site: every message with its tensors, norms and header fields",
        description=(
            "Print the site's audit: one line for each message that left, and the totals of each job. It holds names, "
            "shapes and norms, never a value of the data."
        ),
    )
    command.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="a site's startup kit, its fedtar_state, or one audit file (default: the simulator's sites)",
    )
    command.add_argument("--tensors", action="store_true", help="list every tensor of every message")
    command.add_argument("--totals", action="store_true", help="print the totals alone")
    command.add_argument("--json", action="store_true", help='print {"entries": [...], "totals": [...]}')
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the audit."""
    from fedtar_flare.site.audit import audit_files, read_audit, totals
    from fedtar_flare.site.place import home

    entries = read_audit(audit_files(arguments.folder or home()))
    sums = totals(entries)
    if arguments.json:
        print(json.dumps({"entries": entries, "totals": sums}))
        return 0
    if not arguments.totals:
        below = [_tensors(entry) for entry in entries] if arguments.tensors else None
        print(_table([_line(entry) for entry in entries], below))
        print()
    for total in sums:
        print(
            f"{total['site']}, job {total['job']}, run {total['run']}: {total['messages']} messages "
            f"({total['refused']} refused, {total['errors']} errors), {total['tensors']} tensors, "
            f"{total['bytes'] / 1e6:.3f} MB; {total['streamed']} scalars streamed; last {total['last']}"
        )
    return 0


HEAD = ("time", "site", "method", "task", "round", "step", "outcome", "tensors", "bytes", "norm", "header")


def _line(entry: dict[str, Any]) -> list[str]:
    header = [*(entry.get("numbers") or []), *(entry.get("fields") or [])]
    header += [f"OTHER: {name}" for name in entry.get("other") or []]
    if entry.get("reason"):
        header.append(f"({entry['reason']})")
    show = lambda key: "" if entry.get(key) is None else str(entry[key])  # noqa: E731
    outcome = show("outcome") + ("" if entry.get("status") in (None, "ok") else f", {entry['status']}")
    norm = f"{entry['norm']:.4g}" if entry.get("norm") else ""
    tensors = str(len(entry.get("tensors") or []) or "")
    cells = [show("time"), show("site"), show("method"), show("task"), show("round"), show("step"), outcome, tensors]
    return [*cells, str(entry.get("bytes") or ""), norm, ", ".join(header)]


def _tensors(entry: dict[str, Any]) -> list[str]:
    return [
        f"    {t['name']}  {'x'.join(map(str, t['shape'])) or '1'}  {t['dtype'].removeprefix('torch.')}  "
        f"{t['bytes']} bytes  norm {t['norm']:.4g}  {t.get('group') or 'no group of the contract'}"
        + ("  PERSONAL DATA" if t.get("personal") else "")
        for t in entry.get("tensors") or []
    ]


def _table(lines: list[list[str]], below: list[list[str]] | None) -> str:
    widths = [max(len(row[i]) for row in [list(HEAD), *lines]) for i in range(len(HEAD) - 1)]
    rows = []
    for number, row in enumerate([list(HEAD), *lines]):
        rows.append("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]).rstrip())
        if below and number:
            rows += below[number - 1]
    return "\n".join(rows)
