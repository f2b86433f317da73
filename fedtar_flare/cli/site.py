"""``fedtar site`` and ``audit``: what a hospital's staff does with jobs and with its own state."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtar_flare.cli.commands import (
    Commands,
    ProgressLine,
    add_command,
    add_group,
    add_repeated,
    add_site_choice,
    existing,
    given,
    grouped,
    show,
)
from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.text import columns, plain

if TYPE_CHECKING:
    from fedtar_flare.runtime.deployed import DeployedJob
    from fedtar_flare.site.context import Site

JOB = "folder of the job, as the study lead has it, or the id of a job that this site was sent"
DECISIONS = {  # summary, description, and what is printed
    "pause": (
        "answer no task until 'fedtar site join'",
        "The site abstains at every task from now on, also in a job that runs: what it is computing is thrown away and "
        "the job goes on without it.",
        "paused: the site abstains at every task until 'fedtar site join'",
    ),
    "leave": (
        "decline every task, of this job and of later ones",
        "The site answers every task from now on: that it has left, and the seconds that this took. What it sent "
        "before is part of the shared model and stays there. 'fedtar site purge' deletes what is kept here.",
        "left: the site declines every task until 'fedtar site join'",
    ),
    "join": (
        "take part again",
        "Take part again after 'pause' or 'leave': at the next task of a running job, or at its next round where the "
        "site missed the handshake.",
        "taking part",
    ),
}
HEAD = ("time", "site", "method", "task", "round", "step", "outcome", "tensors", "bytes", "norm", "header")


def add_commands(commands: Commands) -> None:
    """Add the commands."""
    group = add_group(commands, "site", "pause, leave or join; describe, approve jobs; audit, release a model; purge")
    for name, (summary, text, _) in DECISIONS.items():
        command = group.add_parser(name, help=summary, description=text)
        add_site_choice(command)
        command.set_defaults(run=decide)

    command = add_command(group, describe, "what a job asks of this site, what will leave, and whether it may come")
    command.add_argument("job", help=JOB)
    add_site_choice(command)

    command = add_command(group, approve, "let a job train here, where the site file asks for it", with_json=False)
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("job", nargs="?", help=JOB)
    what.add_argument("--list", action="store_true", help="approved jobs, and those at this site that are not")
    what.add_argument("--withdraw", metavar="JOB", help="take an approval back, from the next task on; also by digest")
    command.add_argument("--digest", help="approve only if the job still is the one that 'describe' showed")
    add_site_choice(command)

    command = add_command(group, cells, "how all jobs divide this site's data into cells, and let the next one choose")
    command.add_argument("--release", action="store_true", help="let the next job choose; asks nothing")
    add_site_choice(command)

    command = add_command(group, purge, "delete what is kept of a run or a patient; shows first, deletes with --yes")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", metavar="RUN_ID", dest="run_id", help="state of one run (run ids: see 'fedtar audit')")
    what.add_argument("--patient", metavar="ID", help="one patient's prepared images, and all example pages")
    what.add_argument("--older-than", metavar="DAYS", type=float, help="what nobody wrote to since, audit too")
    what.add_argument("--retention", action="store_true", help="what a running site deletes once a day")
    everything = "state of all runs, all folders of jobs, all prepared images, the audit"
    what.add_argument("--all", action="store_true", dest="everything", help=everything)
    what.add_argument("--cache", action="store_true", help="all prepared images; they are made anew when needed")
    command.add_argument("--yes", action="store_true", help="delete; without it nothing is touched")
    add_site_choice(command)
    command.add_argument("--site-file", type=Path, help="site file of a simulated site")

    command = add_command(group, audit_model, "what a run's adapter remembers of this site's patients")
    command.add_argument("results", type=existing, metavar="run", help="folder of the run, or its adapter folder alone")
    text = "also compare with N repetitions (2 or more) of this site's part of the run on random halves of its patients"
    command.add_argument("--shadows", type=int, default=0, metavar="N", help=text)
    add_repeated(command, "--set", "GROUP.NAME=VALUE", "a setting of the base model, such as model.weights=PATH")
    add_site_choice(command)

    command = add_command(group, vote, "sign whether a run's adapter, audited here before, may leave the study")
    command.add_argument("results", type=existing, metavar="run", help="folder of the run, or its adapter folder alone")
    command.add_argument("answer", choices=("yes", "no"), help="what the site's staff decides")
    command.add_argument("--project", type=Path, required=True, help="project file: the sites that vote, and the gates")
    command.add_argument("-o", "--out", type=Path, default=Path(), help="folder for the vote (default: this one)")
    command.add_argument("--signs", type=Path, metavar="KIT", help="of a simulated site: the kit that signs")
    add_site_choice(command)

    command = add_command(commands, audit, "what left a site: totals of each job, or every message with its tensors")
    where = "the site's startup kit, its fedtar_state, or one audit file (default: the simulator's sites)"
    command.add_argument("--kit", type=Path, help=where)
    command.add_argument("--messages", action="store_true", help="list every message that left, before the totals")
    command.add_argument("--tensors", action="store_true", help="list every message with each of its tensors")
    command.add_argument("--verify", action="store_true", help="follow each file's chain: has a line been changed?")


def decide(arguments: argparse.Namespace) -> None:
    """Write the site's own decision to pause, leave or join."""
    from fedtar_flare.site.context import Participation, decide

    name = arguments.subcommand
    status = {"pause": Participation.PAUSED, "leave": Participation.LEFT, "join": Participation.TAKING_PART}
    print(f"{DECISIONS[name][2]} ({decide(_site(arguments).records, status[name])})")


def describe(arguments: argparse.Namespace) -> None:
    """Print what a job asks of this site, what will leave, which of the site's bounds it is beyond, and its digest.

    Nothing is trained, sent or approved, and no class of the job is loaded but this package's own.
    """
    from fedtar_flare.site.approval import is_approved
    from fedtar_flare.site.job_records import layout_conflicts
    from fedtar_flare.site.site_file import load_site_config

    site = _site(arguments)
    config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
    bounds, job = config.policy, _job(arguments.job, site)
    strategy = job.executor.strategy.at(config.source, config.lora_rank)
    scored = "all" if site.name in job.controller.config.unseen else "test"
    division = {} if config.without_patients else strategy.cell_layout(config, job.controller.config.time_steps)
    division |= {"score": scored}
    beyond = [*job.breaches(bounds), *layout_conflicts(site.records, str(config.path), division)]
    approved = is_approved(site.records, job.digest)
    verdict = "THIS SITE DECLINES IT, as it is beyond its bounds:" if beyond else "within the bounds of this site"
    state = f"not approved here. To approve it: fedtar site approve {arguments.job} --digest {job.digest}"
    if approved:
        state = "approved here"
    elif bounds.approval == "none":
        state = "needs no approval here (site file, policy: {approval: none})"
    data = {"job": job.name, "digest": job.digest, "approved": approved, "beyond": beyond}
    reasons = [f"  {reason}" for reason in beyond]
    whose = "all patients of this site, which never trains" if scored == "all" else "its test patients"
    job_says = f"{job.describe()}\nscores are of {whose}"
    show(arguments, data, job_says, "", verdict, *reasons, f"digest: {job.digest}", state)


def approve(arguments: argparse.Namespace) -> None:
    """Approve a job as it lies in its folder, list what is approved, or take an approval back.

    The approval is bound to the job's content and to one run of it: a job that was changed in any way, or that is to
    run again, needs another one. Each approval is written into the site's audit.
    """
    from fedtar_flare.site import approval

    site = _site(arguments)
    if arguments.list:
        for entry in approval.approvals(site.records):
            run = f", for run {entry.run}" if entry.run else ""
            print(f"approved  {entry.time}  {entry.digest}  {entry.name}  (by {entry.by}{run})")
        sent = [] if site.simulated else sorted(site.workspace.glob(f"*/app_*/{approval.CLIENT_CONFIG}"))
        for app in (config.parents[1] for config in sent):
            if not approval.is_approved(site.records, digest := approval.digest_of(app)):
                print(f"held      {'-':20}  {digest}  {app.parent.name}")
        return
    if arguments.withdraw:
        digest = arguments.withdraw
        if not approval.DIGEST.fullmatch(digest):
            digest = _job(digest, site).digest
        if not approval.withdraw(site.records, digest):
            raise ConfigError(f"no job of digest {digest} is approved here; 'fedtar site approve --list' shows them")
        _record(site, "withdrawn", digest)  # a withdrawal counts also where it cannot be written down
        print(f"withdrawn: {digest}")
        return
    job = _job(arguments.job, site)
    if arguments.digest not in (None, job.digest):
        raise ConfigError(f"the job's digest is {job.digest}: it is not the one that you have seen. Describe it again")
    _record(site, "approved", job.digest)
    entry = approval.approve(site.records, job.digest, job.name)
    print(f"approved: {entry.name}, digest {entry.digest}, by {entry.by}")


def cells(arguments: argparse.Namespace) -> None:
    """Print how this site's data is divided into cells: the time steps, how visits come into them, and the smallest
    cell. The first job has chosen it, and another division is declined, because the difference of two cells that are
    divided differently can be a single visit. With --release the next job may choose: after the data has changed much,
    or where you accept that risk.
    """
    from fedtar_flare.site.job_records import CELLS, read_record

    site = _site(arguments)
    layouts = read_record(site.records / CELLS)
    lines = []
    for data, layout in layouts.items():
        lines.append(f"{data}: {', '.join(f'{name} {value}' for name, value in layout.items())}")
    if arguments.release and layouts:
        _record(site, "released", "cells")
        (site.records / CELLS).unlink()
        lines.append("released: the next job chooses")
    show(arguments, {"cells": layouts, "released": arguments.release}, *(lines or ["no job has divided the data yet"]))


def audit_model(arguments: argparse.Namespace) -> int:
    """Test on this site's own patients what a run's adapter remembers: whether its losses tell training patients from
    held-out ones (an AUC of 0.5 tells nothing), and phrases of 8 words in its drafts that stand in one patient's
    reports alone. Exit code 1 where it is above the site's policy.max_membership_auc.

    Everything stays here; 'fedtar site vote' gives the study lead a rounded summary.
    """
    from fedtar_flare.models.sources import garbage_collection_paused
    from fedtar_flare.site.site_file import load_site_config

    with garbage_collection_paused():
        from fedtar_flare.reporting.model_audit import table
        from fedtar_flare.runtime.shadows import train_shadow
        from fedtar_flare.site.model_audit import audit_model

    adapter, site = _adapter(arguments.results), _site(arguments)
    config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
    model = grouped(arguments.set, ("model",)).get("model", {})
    with ProgressLine() as line:
        result = audit_model(adapter, site, config, model, line, arguments.shadows, train_shadow)
    show(arguments, result, *table(result))
    return int(result["held"])


def vote(arguments: argparse.Namespace) -> int:
    """Sign this site's vote on the release of an adapter, with its dossier: the audit, rounded; data card; privacy
    account; approval; version. The file goes to the study lead. Exit code 1 where a gate of the project file, or the
    site's policy, holds the release whatever the answer.
    """
    from fedtar_flare.core.files import write_bytes
    from fedtar_flare.reporting.model_audit import VOTE
    from fedtar_flare.site.release import read_project, vote
    from fedtar_flare.site.signatures import sign
    from fedtar_flare.site.site_file import load_site_config

    site, project = _site(arguments), read_project(arguments.project)
    config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
    dossier = vote(_adapter(arguments.results), site, config, project, arguments.answer == "yes")
    signed = sign(dossier.to_dict(), arguments.signs or site.workspace)
    _record(site, "vote signed", f"run {dossier.run_id}: {arguments.answer}", "(release)")
    file = write_bytes(arguments.out / VOTE.format(site=site.name), signed)
    lines = [f"sites that vote: {', '.join(project.sites)}", f"gates: {project.gates}"]
    lines += [f"HELD: {reason}" for reason in dossier.reasons]
    show(arguments, dossier.to_dict(), *lines, f"{site.name} votes {arguments.answer}; for the study lead: {file}")
    return int(bool(dossier.reasons))


def _adapter(folder: Path) -> Path:
    from fedtar_flare.models.adapters.peft_file import ADAPTER_INFO
    from fedtar_flare.reporting.run import find_run

    return folder if (folder / ADAPTER_INFO).is_file() else find_run(folder) / "adapter"


def _site(arguments: argparse.Namespace) -> Site:
    from fedtar_flare.core.settings import suggestion
    from fedtar_flare.site.context import Site, home
    from fedtar_flare.site.site_file import sites_folder

    name, files = arguments.simulated, folder.glob("*.yaml") if (folder := sites_folder()) else ()
    known = sorted({file.stem for file in files} | {path.name for path in (home() / "state" / "sites").glob("*")})
    if name and name not in known:
        choice = ", ".join(known) or "none: run 'fedtar simulate' first"
        raise ConfigError(f"there is no simulated site '{name}'{suggestion(name, known)} (known: {choice})")
    return Site.outside_of_jobs(arguments.kit, arguments.simulated)


def _job(text: str, site: Site) -> DeployedJob:
    from fedtar_flare.runtime.deployed import app_of, read_job

    for folder in (Path(text).expanduser(), site.workspace / text):
        if folder.is_dir():
            return read_job(app_of(folder, site.name))
    raise ConfigError(f"'{text}' is neither a folder nor the id of a job in {site.workspace}")


def _record(site: Site, outcome: str, digest: str, task: str = "(approval)") -> None:
    from fedtar_flare.site import audit

    try:
        audit.write(site, "approvals", {"task": task, "outcome": outcome, "reason": digest})
    except OSError as error:
        raise FedTARError(f"the audit cannot be written ({error}); free the disk or repair the rights") from error


def purge(arguments: argparse.Namespace) -> None:
    """Show what would be deleted at this site and what cannot be; with --yes, delete it.

    Without this command only superseded state of a running job is deleted (three rounds stay), and once a day what only
    a resume needs of a run that ended well 14 days ago, and what is older than the site file's 'retention_days', if it
    says any. Run it while no job runs here.
    """
    from fedtar_flare.site.purge import plan

    what = given(arguments, "patient", "older_than", "retention", "everything", "cache")
    deletion = plan(_site(arguments), arguments.site_file, run=arguments.run_id, **what)
    if arguments.yes:
        deletion.carry_out()
    done = "deleted" if arguments.yes else "would delete"
    lines = [f"{done}: {what}: {path}" for path, what in deletion.remove] or ["nothing to delete"]
    lines += [f"stays: {line}" for line in deletion.stays]
    if deletion.remove and not arguments.yes:
        lines.append("Nothing was touched. Add --yes to delete.")
    remove = [{"path": path, "what": what} for path, what in deletion.remove]
    show(arguments, {"deleted": arguments.yes, "remove": remove, "kept": deletion.stays}, *lines)


def audit(arguments: argparse.Namespace) -> int:
    """Print the totals of each job from the site's audit, with --messages also one line for each message that left. The
    audit holds names, shapes and norms, never a value of the data. With --verify, exit code 1 where a line was changed,
    left out or put in.
    """
    from fedtar_flare.site.audit import audit_files, read_audit, totals, verify
    from fedtar_flare.site.context import home

    files = audit_files(arguments.kit or home())
    if arguments.verify:
        chains, lines = [verify(file) for file in files], []
        for chain in chains:
            state = "BROKEN" if chain.problem else "whole "
            lines.append(f"{state}  {chain.file}: {chain.lines} lines; last {chain.digest}")
            lines += [f"        {chain.problem}"] if chain.problem else []
        show(arguments, [vars(chain) for chain in chains], *lines)
        return int(any(chain.problem for chain in chains))
    entries = read_audit(files)
    sums = totals(entries)
    listed = arguments.messages or arguments.tensors
    rows = columns([HEAD, *map(_audit_row, entries)]) if listed else []
    lines = []
    for line, entry in zip(rows, [{}, *entries] if listed else (), strict=True):
        lines.append(line)
        for t in entry.get("tensors") or [] if arguments.tensors else []:
            shape = "x".join(map(str, t["shape"])) or "1"
            size = f"{t['dtype'].removeprefix('torch.')}  {t['bytes']} bytes  norm {t['norm']:.4g}"
            group = t.get("group") or "no group of the contract"
            personal = "  PERSONAL DATA" if t.get("personal") else ""
            lines.append(f"    {plain(t['name'])}  {shape}  {size}  {group}{personal}")
    lines += [""] * listed
    for total in sums:
        left = f"{total['messages']} messages ({total['refused']} refused, {total['errors']} errors)"
        size = f"{total['tensors']} tensors, {total['bytes'] / 1e6:.3f} MB"
        lines.append(f"{total['site']}, job {total['job']}, run {total['run']}: {left}, {size}; last {total['last']}")
    show(arguments, {"entries": entries, "totals": sums}, *lines)
    return 0


def _audit_row(entry: dict[str, Any]) -> tuple[str, ...]:
    known = {name: value for name, value in entry.items() if value is not None}
    status = known.get("status", "ok")
    header = [*known.get("numbers", ()), *known.get("fields", ())]
    header += [f"OTHER: {name}" for name in known.get("other", ())]
    header += [f"({known['reason']})"] if known.get("reason") else []
    cells = known | {
        "outcome": known.get("outcome", "") + (f", {status}" if status != "ok" else ""),
        "tensors": len(known.get("tensors", ())) or "",
        "bytes": known.get("bytes") or "",
        "norm": f"{entry['norm']:.4g}" if known.get("norm") else "",
        "header": ", ".join(header),
    }
    return tuple(plain(cells.get(name, "")) for name in HEAD)
