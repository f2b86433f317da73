"""Continues a run whose job ended, which FLARE cannot: a new job, the same run; or makes its last rounds again.

The server keeps each job's checkpoints in its kit (``fedtar_checkpoints/<job id>/``), and the sites their own state. A
job that names the old one continues after its last whole round, with the same run id, weights, state and optimiser.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.lighter import utils as flare

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import read_json, write_json
from fedtar_flare.provision.status import FINISHED, admin_of, open_session, wait_for_sites
from fedtar_flare.record.events import Joined, Start
from fedtar_flare.record.log import ROUNDS_FILE, of_kind, read_events
from fedtar_flare.site.approval import SIGNATURES, mappings, only

if TYPE_CHECKING:
    from fedtar_flare.runtime.recipe import MethodRecipe

SERVER_CONFIG, CLIENT_CONFIG = "config_fed_server.json", "config_fed_client.json"
_DURATION = re.compile(r"(?:(\d+) days?, )?(\d+):(\d+):(\d+)")


def resume(
    job_id: str,
    kit: Path,
    *,
    job_folder: Path | None = None,
    rounds: int | None = None,
    force: bool = False,
    period: bool = False,
    begins: str | None = None,
    learn: str | None = None,
    min_sites: int | None = None,
    before: int | None = None,
    submit: bool = True,
) -> dict[str, Any]:
    """Submit a job that continues an ended one's run, or remakes its rounds from ``before`` on (:func:`remake_of`)."""
    if force and job_folder is None:
        raise ConfigError("--force needs --job: FLARE gives nobody the files of a job that it takes for running")
    if not re.fullmatch(r"[0-9A-Za-z-]+", job_id):
        raise ConfigError(f"'{job_id}' is no id of a job; 'fedtar status' lists them")
    with open_session(kit) as session, tempfile.TemporaryDirectory() as folder:
        meta = session.get_job_meta(job_id)
        status = str(meta.get("status"))
        if not status.startswith(FINISHED) and not force:
            cure = "abort it first (nvflare job abort), or use --force with --job where its server was killed"
            raise FedTARError(f"job {job_id} is {status}: {cure}")
        source, remake = job_folder, dict[str, Any]()
        if source is None or before is not None:
            (download := Path(folder) / "download").mkdir()
            copies = sorted(Path(str(session.download_job_result(job_id, str(download)))).glob("job/*/meta.json"))
            if not copies:
                raise FedTARError(f"the server's copy of job {job_id} has no definition; give the job's folder (--job)")
            results = copies[0].parents[2]
            remake = {} if before is None else remake_of(results, before)
            if not submit:
                return remake
            if source is None:
                _require_own(source := copies[0].parent, kit)
            workspace = results / "workspace"  # there is none where the server itself was killed
            whole = any(workspace.rglob("checkpoint/round-*.safetensors")) or not workspace.is_dir()
            if not whole and remake.get("before") != 0:
                raise FedTARError(f"job {job_id} ended before its first round was whole: submit it anew")
            wait_for_sites(session, members(workspace), min_sites)
        job = Path(folder) / "job" / source.name
        shutil.copytree(source, job, ignore=shutil.ignore_patterns(*SIGNATURES))
        if period:
            add_period(job, rounds or 1, begins or _day_after(meta), learn)
        resumed_job(job, job_id, None if period else rounds, min_sites, remake.get("before"))
        return remake | {"job_id": str(session.submit_job(str(job)))}


def _require_own(job: Path, kit: Path) -> None:
    """Refuse a server's copy of a job that is not as this kit's user signed it: the user is about to sign it again."""
    user = admin_of(kit)
    verified, signers = flare.verify_folder_signature_and_get_signers(str(job), str(kit / "startup" / "rootCA.pem"))
    if not verified or {name for name, *_ in signers} != {user}:
        text = f"the server's copy of the job is not as {user} signed it, or that certificate has ended since then"
        raise FedTARError(f"{text}: name the job's own folder (--job)")


def members(workspace: Path) -> list[str]:
    """Sites that took part in a job, by the record in its downloaded workspace; none where it has no record."""
    events = [event for file in workspace.rglob(ROUNDS_FILE) for event in read_events(file.parent)]
    joined = {site for event in of_kind(events, Joined) for site in event.sites}
    return sorted(joined.union(*(event.sites for event in of_kind(events, Start))))


def remake_of(results: Path, before: int) -> dict[str, Any]:
    """What it takes to make a job's rounds from ``before`` on again: from the checkpoint ``after`` a round (0: from the
    start, and ``before`` is 0 too) so many ``rounds``; as recorded, their ``answers`` and ``hours`` of training.
    """
    from fedtar_flare.reporting.run import read_run
    from fedtar_flare.runtime.checkpoint import CheckpointFolder

    run = read_run(results)
    if not 1 <= before <= run.start.rounds:
        raise ConfigError(f"--before {before}: the run has rounds 1 to {run.start.rounds}")
    after = max((r for r in CheckpointFolder(run.folder / "checkpoint").rounds() if r < before), default=0)
    if not after and run.start.first_round > 1:
        cure = "name the job that had these rounds, then continue the new run, or submit the study's job anew"
        raise ConfigError(f"--before {before}: this job began with round {run.start.first_round}; {cure}")
    steps = [step for step in run.steps if step.round > after]
    answers = sum(len(step.sites) for step in steps)
    answers += sum(len(closed.sites) for closed in run.validations if closed.round > after)
    remake: dict[str, Any] = {"before": before if after else 0, "after": after, "rounds": run.start.rounds - after}
    return remake | {"answers": answers, "hours": sum(step.seconds for step in steps) / 3600}


def _day_after(meta: Mapping[str, Any]) -> str:
    """The day (UTC) after a job ended, by its start and duration as FLARE tells them; ConfigError before it has come:
    visits of the day count in the period before, and what came while the job ran may have been learnt from.
    """
    began = datetime.fromisoformat(str(meta.get("start_time") or meta["submit_time_iso"])).astimezone(UTC)
    lasted = _DURATION.match(str(meta.get("duration")))
    days, hours, minutes, seconds = (int(number or 0) for number in lasted.groups()) if lasted else (0, 0, 0, 0)
    day = (began + timedelta(days + 1, seconds, minutes=minutes, hours=hours)).date()
    if day > datetime.now(UTC).date():
        raise ConfigError(f"the new period would begin on {day}, the day after the job ended, which has not come")
    return day.isoformat()


def resumed_job(
    job: Path, job_id: str, rounds: int | None = None, min_sites: int | None = None, again: int | None = None
) -> None:
    """Change an exported job in place so that it goes on with ``job_id``, or makes rounds of it again; 0: all."""
    changed = 0
    if min_sites is not None:
        if min_sites < 1:
            raise ConfigError(f"min_sites must be at least 1, not {min_sites}")
        write_json(job / "meta.json", read_json(job / "meta.json") | {"min_clients": min_sites})
    for config in _edited(job, SERVER_CONFIG):
        for workflow in config.get("workflows", []):
            if not str(workflow.get("path", "")).startswith("fedtar_flare."):
                continue
            arguments = workflow.setdefault("args", {})
            before = int(arguments.get("num_rounds", 1))
            if rounds is not None and rounds < before:
                raise ConfigError(f"rounds must be at least the run's own {before}, not {rounds}")
            changes = {"num_rounds": rounds, "min_sites": min_sites}
            _begin(arguments, job_id, again)
            arguments |= {name: value for name, value in changes.items() if value is not None}
            changed += 1
    if not changed:
        raise ConfigError(f"{job} holds no job of fedtar_flare (no workflow of it in {SERVER_CONFIG})")


def _begin(server: dict[str, Any], resume_from: str, again: int | None) -> None:
    """Have the server begin with a job's checkpoint, with ``again`` for the rounds from there on; 0: at its start."""
    server.pop("remake_before", None)
    server |= {"resume_from": "" if again == 0 else resume_from} | ({"remake_before": again} if again else {})
    if again != 0:
        server.pop("initial_checkpoint", None)


def add_period(job: Path, rounds: int, begins: str, learn: str | None = None) -> None:
    """Change an exported job in place so that it has more rounds, and a time step more for visits from a day on."""
    for config in _edited(job, SERVER_CONFIG):
        for workflow in config.get("workflows", []):
            arguments = workflow.setdefault("args", {})
            for name, more in (("num_rounds", rounds), ("time_steps", 1)):
                arguments[name] = arguments.get(name, _default(name)) + more
    for config in _edited(job, CLIENT_CONFIG):
        for entry in config.get("executors", []):
            arguments = entry["executor"].setdefault("args", {})
            settings = arguments["settings"] = arguments.get("settings") or {}
            settings["data"] = with_period(settings.get("data") or {}, begins, learn)


def _edited(job: Path, name: str) -> Iterator[dict[str, Any]]:
    """The configurations of this name in a job, each written back after it was changed."""
    for file in sorted(job.rglob(name)):
        yield (config := read_json(file))
        write_json(file, config)


def continued_recipe(
    results: Path, rounds: int, begins: str | None = None, learn: str | None = None, again: int | None = None
) -> MethodRecipe:
    """Make the recipe that continues a simulated run, as :func:`resume` does."""
    from fedtar_flare.runtime.recipe import MethodRecipe

    config = results.resolve().parent / "app_server" / "config"
    if not (config / SERVER_CONFIG).is_file():
        where = "name the results where they are made, <workspace>/<name>/server/simulate_job/fedtar"
        raise ConfigError(f"{results}: the job of this simulation is not beside it: {where}")
    server = dict(only(config / SERVER_CONFIG, "workflows").get("args") or {})
    components = mappings(read_json(config / SERVER_CONFIG), "components", config / SERVER_CONFIG)
    site = only(config / CLIENT_CONFIG, "executors")["executor"].get("args") or {}
    at_server, groups = server.pop("settings", None) or {}, dict(site.get("settings") or {})
    common = {name: server.pop(name, _default(name)) for name in ("num_rounds", "time_steps", "min_sites", "seed")}
    if begins:
        groups["data"] = with_period(groups.get("data") or {}, begins, learn)
        common["time_steps"] += 1
    common |= {"num_rounds": common["num_rounds"] + rounds, "name": results.resolve().parents[2].name}
    common |= {name: site[name] for name in ("preset", "torch_threads") if name in site}
    if tracker := next((entry for entry in components if entry.get("id") == "mlflow"), None):
        common["mlflow"] = tracker["args"]["tracking_uri"]
    server |= at_server.get("server", {})
    _begin(server, str(results.resolve() / "checkpoint"), again)
    return MethodRecipe(server.pop("method"), server=server, **common, **groups)


def with_period(data: Mapping[str, Any], begins: str, learn: str | None = None) -> dict[str, Any]:
    """The settings ``data`` with a period that begins on a day (ISO 8601); ConfigError where there can be none."""
    if data.get("alignment") != "period":
        raise ConfigError("time steps of this run are visits, not periods: use 'fedtar resume --rounds' for new visits")
    from fedtar_flare.core.settings import build
    from fedtar_flare.learning.config import DataConfig

    periods = [*data.get("periods", ()), begins]
    build(DataConfig, {"alignment": "period", "periods": periods}, "data")
    return {**data, "periods": periods, **({"replay_share": float(learn == "all")} if learn else {})}


def _default(name: str) -> Any:
    """Of an argument of the controller, which an exported job leaves out."""
    from fedtar_flare.runtime.server_config import ServerConfig

    return ServerConfig.model_fields[name].default
