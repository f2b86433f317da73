"""The release of a run's adapter: a vote of every site of the study, signed by its own key, and a signed manifest.

A vote is of one adapter, file by file, and of the sites and gates of the project file that the staff has seen, so that
it is of no use for another. Gates are held against the audit's exact figures at the site; what leaves is rounded.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import hashes, read_bytes, read_json, read_yaml, write_bytes
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.data.minimum_cell import round_to_cell
from fedtar_flare.models.adapters.hub import MANIFEST, adapter_folder
from fedtar_flare.models.adapters.peft_file import adapter_hashes, read_adapter_info
from fedtar_flare.record.log import utc_now
from fedtar_flare.reporting.model_audit import MEASURES, PARTS, VOTE, Project, Vote
from fedtar_flare.reporting.model_card import write_model_card
from fedtar_flare.reporting.run import Run
from fedtar_flare.site.accountant import FILE, PATIENT_DELTA, PATIENT_FILE, Ledger, PatientLedger
from fedtar_flare.site.approval import approvals
from fedtar_flare.site.audit import FOLDER, read_audit
from fedtar_flare.site.context import Site
from fedtar_flare.site.model_audit import AUDIT, WORDS
from fedtar_flare.site.signatures import sign, verify
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import RUN, SiteState
from fedtar_flare.version import __version__

__all__ = ["verify_release"]


class Manifest(Settings):
    """What a lead signs: the sites' votes, and the SHA-256 of the adapter's files."""

    votes: dict[str, str]
    files: dict[str, str]
    time: str


def read_project(file: Path) -> Project:
    """Read the sites and gates of a project file, in the form of ``nvflare provision``."""
    content = read_yaml(file, "a project")
    try:
        sites = sorted(entry["name"] for entry in content["participants"] if entry["type"] == "client")
        return build(Project, {**content["release"], "name": content["name"], "sites": sites}, f"{file}: release")
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file}: no 'name', 'participants' or 'release' (gates; {{}}: the defaults)") from error


def vote(adapter: Path, site: Site, config: SiteConfig, project: Project, yes: bool) -> Vote:
    """Make a site's vote on an adapter that it has audited, or that it had no part in."""
    info, files = read_adapter_info(adapter), adapter_hashes(adapter)
    run_id, reasons, epsilon = str(info["run_id"]), list[str](), dict[str, float | None]()
    content: dict[str, Any] = {"site": site.name, "run_id": run_id, "round": info["round"], "adapter": files}
    content |= {"held": False, "parts": {}, "data": {"took part": "no"}}
    state = SiteState(site.state_root(config.state_dir), run_id, site.name)
    sent = read_audit((site.records / FOLDER).glob("*.jsonl"))
    if (state.folder / RUN).is_file() or any(entry.get("run") == run_id and entry.get("tensors") for entry in sent):
        about, audited = state.about_run(), read_json(file) if (file := state.folder / AUDIT).is_file() else {}
        if audited.get("adapter") != files:
            raise ConfigError(f"{adapter} was not audited here as it is now: run 'fedtar site audit-model' first")
        scope = run_id if site.simulated else None
        epsilon["patients"] = PatientLedger(site.records / PATIENT_FILE, scope).spent(run_id)
        if Ledger(site.records / FILE, run_id).spent(PATIENT_DELTA).releases:
            epsilon["messages"] = Ledger(site.records / FILE, scope).spent(PATIENT_DELTA).epsilon
        reasons += gates_beyond(project, audited, epsilon["patients"])
        if audited["held"]:
            reasons.append("max_membership_auc of the site's own policy")
        if unnamed := {site.name, *about.get("sites", ())} - set(project.sites):
            reasons.append(f"the project file does not name {', '.join(sorted(unnamed))} of the run")
        patients = {name: round_to_cell(group["all"], audited["least"]) for name, group in audited["patients"].items()}
        content |= {"held": audited["held"], "parts": audited["rounded"]}
        content |= {"data": {"source": config.source, "time_steps": about["time_steps"], **patients}}
    # finer, epsilon would count patients
    content |= {"epsilon": {of: math.ceil(10 * value) / 10 for of, value in epsilon.items() if value is not None}}
    content |= {"approval": next((entry.digest for entry in approvals(site.records) if entry.run == run_id), "")}
    content |= {"version": __version__, "time": utc_now()}
    return build(Vote, content | {"project": project, "yes": yes, "reasons": reasons}, "the vote")


def gates_beyond(gates: Project, audited: Mapping[str, Any], epsilon: float | None) -> Iterator[str]:
    """Name the gates that an audit of the shared adapter, by its exact figures, is beyond."""
    part = audited["parts"][PARTS[1]]
    for name, error in {"membership_auc": "standard", "loss_auc": "loss", "shadow_auc": "shadow"}.items():
        if name in part and part[name] - 1.96 * part[f"{error}_error"] > gates.max_membership_auc:
            yield f"max_membership_auc ({MEASURES[name]})"
    training, held_out = part["training"], part["held_out"]
    learnt = max(training["longest_own"], training["longest_other"], held_out["longest_other"])
    by_chance = max(WORDS, held_out["longest_own"], training["longest_unseen"], held_out["longest_unseen"])
    if learnt - by_chance > gates.max_words:
        yield "max_words"
    if part.get("exposure", 0) > gates.max_exposure or part.get("written"):
        yield "max_exposure"
    if gates.max_epsilon is not None and (epsilon is None or epsilon > gates.max_epsilon):
        yield "max_epsilon"


def release(run: Run, project: Project, kit: Path) -> Path:
    """Check the votes in a run's folder, and write card and manifest beside the adapter; or refuse."""
    adapter, root = run.folder / "adapter", kit / "startup" / "rootCA.pem"
    files = {site: run.folder / VOTE.format(site=site) for site in project.sites}
    votes = {site: read_bytes(file).decode("latin-1") for site, file in files.items() if file.is_file()}
    if unnamed := {*run.start.sites, *(site for step in run.steps for site in step.sites)} - set(project.sites):
        raise FedTARError(f"not released: the project file does not name {', '.join(sorted(unnamed))} of the run")
    check_votes(votes, adapter, root, project)
    write_model_card(run, adapter)
    content = {"votes": votes, "files": _files(adapter), "time": utc_now()}
    manifest = write_bytes(adapter / MANIFEST, sign(content, kit))
    verify_release(adapter, root)
    return manifest


def verify_release(adapter: Path | str, root: Path | str) -> None:
    """Verify that every site of a study voted for an adapter as it lies in its folder.

    Parameters
    ----------
    adapter : Path or str
        The ``adapter`` folder, with the ``release.json`` that ``fedtar release`` wrote.
    root : Path or str
        Root certificate of the federation, ``rootCA.pem`` of a kit.

    Raises
    ------
    FedTARError
        It was not released, a byte was changed, or a vote is missing, says no or is of another adapter.
    """
    adapter, root = Path(adapter), Path(root)
    if not (manifest := adapter / MANIFEST).is_file():
        raise FedTARError(f"{adapter} has no {MANIFEST}: it was not released")
    content, (name, *roles) = verify(read_bytes(manifest), root, str(manifest))
    if not {"lead", "project_admin"} & set(roles):
        raise FedTARError(f"{manifest} is signed by {name}, whose role is not lead or project_admin")
    released = build(Manifest, content, str(manifest))
    if changed := {name for name, _ in released.files.items() ^ _files(adapter).items()}:
        raise FedTARError(f"{adapter} is not as it was released: {', '.join(sorted(changed))}")
    check_votes(released.votes, adapter, root)


def released_adapter(adapter: Path, root: Path | None, online: bool = False) -> Path:
    """Find an adapter's local folder, by itself or by its id on the hub, which only ``online`` may be asked.

    It is verified by the root certificate of its federation (:func:`verify_release`); without one, ConfigError for an
    adapter that was released.
    """
    folder = adapter_folder(adapter, online)
    if root:
        verify_release(folder, root)
    elif (manifest := folder / MANIFEST).is_file():
        raise ConfigError(f"{manifest} says that the adapter was released: name the root certificate (--root)")
    return folder


def check_votes(votes: Mapping[str, str], adapter: Path, root: Path, project: Project | None = None) -> None:
    """Check signed votes by site, all by one project file; FedTARError with all that stands against a release."""
    info, files, problems = read_adapter_info(adapter), adapter_hashes(adapter), []
    for site, signed in votes.items():
        try:
            content, signer = verify(signed.encode("latin-1"), root, f"the vote of {site}")
            ballot = build(Vote, content, f"the vote of {site}")
        except ConfigError as error:
            problems.append(str(error))
            continue
        project = project or ballot.project
        if [site, ballot.site] != [*signer, site]:
            problems.append(f"the vote of {site} is signed by {' '.join(signer)}, for {ballot.site}")
        if (ballot.run_id, ballot.round, ballot.adapter) != (info["run_id"], info["round"], files):
            problems.append(f"{site} voted on another adapter, of run {ballot.run_id}, round {ballot.round}")
        if ballot.project != project:
            problems.append(f"{site} voted by a project file with other sites or gates")
        problems += [f"{site} votes no"] * (not ballot.yes) + [f"{site} is held: {why}" for why in ballot.reasons]
    differing = set(project.sites if project else ["any site"]) ^ set(votes)
    problems += [f"no vote of {site}, or none is asked for" for site in sorted(differing)]
    if problems:
        raise FedTARError("\n".join(["not released:", *problems]))


def _files(adapter: Path) -> dict[str, str]:
    return {name: digest for name, digest in hashes(adapter).items() if name != MANIFEST}
