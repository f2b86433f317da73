"""``fedtar site describe`` and ``approve``: what a job asks of a hospital, and the hospital's yes or no to it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fedtar_flare.cli.commands import Commands, add_command, add_place
from fedtar_flare.errors import ConfigError, FedTARError

if TYPE_CHECKING:
    from fedtar_flare.runtime.deployed import DeployedJob
    from fedtar_flare.site.place import Site

JOB = "folder of the job, as the study lead has it, or the id of a job that this site was sent"


def add_commands(group: Commands[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    command = add_command(group, describe, "what a job asks of this site, what will leave, and whether it may come")
    command.add_argument("job", help=JOB)
    command.add_argument("--json", action="store_true", help="print digest, approval and what it is beyond, as JSON")
    add_place(command)

    command = add_command(group, approve, "let a job train here, where the site file says 'approval: required'")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("job", nargs="?", help=JOB)
    what.add_argument("--list", action="store_true", help="approved jobs, and those at this site that are not")
    what.add_argument("--withdraw", metavar="JOB", help="take an approval back, from the next task on; also by digest")
    command.add_argument("--digest", help="approve only if the job still is the one that 'describe' showed")
    add_place(command)


def describe(arguments: argparse.Namespace) -> None:
    """Print what a job asks of this site, what will leave, which of the site's bounds it is beyond, and its digest.

    Nothing is trained, sent or approved, and no class of the job is loaded but this package's own.
    """
    from fedtar_flare.site.approval import is_approved
    from fedtar_flare.site.site_file import load_site_config

    site = _site(arguments)
    workspace = None if site.simulated else site.workspace
    bounds = load_site_config(site.name, workspace=workspace, simulator=site.simulated).policy
    job = _job(arguments.job, site)
    beyond, approved = job.breaches(bounds), is_approved(site.records, job.digest)
    if arguments.json:
        print(json.dumps({"job": job.name, "digest": job.digest, "approved": approved, "beyond": beyond}))
        return
    print(job.describe())
    print("\nwithin the bounds of this site" if not beyond else "\nTHIS SITE DECLINES IT, as it is beyond its bounds:")
    print("".join(f"  {reason}\n" for reason in beyond), end="")
    print(f"digest: {job.digest}")
    if approved:
        print("approved here")
    elif bounds.approval == "required":
        print(f"not approved here. To approve it: fedtar site approve {arguments.job} --digest {job.digest}")
    else:
        print("needs no approval here (site file, policy: {approval: none})")


def approve(arguments: argparse.Namespace) -> None:
    """Approve a job as it lies in its folder, list what is approved, or take an approval back.

    The approval is bound to the job's content: a job that was changed in any way needs another one. Each approval is
    written into the site's audit.
    """
    from fedtar_flare.site import approval

    site = _site(arguments)
    if arguments.list:
        for entry in approval.approvals(site.records):
            print(f"approved  {entry.time}  {entry.digest}  {entry.name}  (by {entry.by})")
        for name, digest in _not_approved(site):
            print(f"held      {'-':20}  {digest}  {name}")
        return
    if arguments.withdraw:
        digest = arguments.withdraw
        if not approval.is_digest(digest):
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


def _site(arguments: argparse.Namespace) -> Site:
    from fedtar_flare.site.place import Site, kit_of

    if arguments.simulated:
        return Site.outside_of_jobs(arguments.simulated, Path(), simulated=True)
    kit = kit_of(arguments.kit)
    return Site.outside_of_jobs(kit.name, kit, simulated=False)


def _job(text: str, site: Site) -> DeployedJob:
    from fedtar_flare.runtime.deployed import app_of, read_job

    for folder in (Path(text).expanduser(), site.workspace / text):
        if folder.is_dir():
            return read_job(app_of(folder, site.name))
    raise ConfigError(f"'{text}' is neither a folder nor the id of a job in {site.workspace}")


def _not_approved(site: Site) -> list[tuple[str, str]]:
    """Jobs that FLARE has put at the site and that are not approved: their ids and digests."""
    from fedtar_flare.site.approval import CLIENT_CONFIG, digest_of, is_approved

    configs = [] if site.simulated else sorted(site.workspace.glob(f"*/app_*/{CLIENT_CONFIG}"))
    jobs = [(config.parents[2].name, digest_of(config.parents[1])) for config in configs]
    return [(name, digest) for name, digest in jobs if not is_approved(site.records, digest)]


def _record(site: Site, outcome: str, digest: str) -> None:
    from fedtar_flare.site import audit

    try:
        audit.write(site, "approvals", {"task": "(approval)", "outcome": outcome, "reason": digest})
    except OSError as error:
        raise FedTARError(f"the audit cannot be written ({error}); free the disk or repair the rights") from error
