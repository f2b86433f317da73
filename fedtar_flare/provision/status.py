"""The jobs of a running federation, asked over mTLS with an admin's startup kit."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import read_json
from fedtar_flare.core.text import gauges, plain, quoted
from fedtar_flare.record.log import STATS_GROUP

FINISHED = ("FINISHED", "FAILED")  # how the status of an ended job begins
REASON = "fedtar_reason"  # where a job's meta data at the server has why its run ended as it did
CERTIFICATES = "fedtar_certificates"  # where the server's status has when participants' certificates end
SOON_SECONDS = 30 * 86400.0  # before and after its end: one that ended longer ago is of who has left
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading an answer raises that is not of the form that this release sends."""
CONNECT_SECONDS, WAIT_SECONDS = 20.0, 120.0
"""How long to wait for the server's answer to a login, and for sites before a job is submitted."""


@contextlib.contextmanager
def open_session(kit: Path) -> Iterator[Any]:
    """FLARE's session of the admin user whose kit this is; FedTARError if the server does not answer or refuses."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    user = admin_of(kit)
    session = None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # FLARE says what it connects to; a script reads our own output
            session = new_secure_session(user, str(kit.resolve()), timeout=CONNECT_SECONDS)
        yield session
    except FedTARError:
        raise
    except Exception as error:  # FLARE's sessions raise a dozen kinds; each has its reason as its text
        reason = str(error) or type(error).__name__
        if session is not None and isinstance(error, MALFORMED):
            text = f"the server's answer is malformed ({user}; {type(error).__name__}: {reason})"
            raise FedTARError(f"{text}; ask who runs it which release of fedtar_flare it has") from error
        raise FedTARError(f"the server refused or did not answer ({user}): {reason}") from error
    finally:
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()


def admin_of(kit: Path) -> str:
    """Read the name of the admin user whose startup kit this is."""
    file = kit / "startup" / "fed_admin.json"
    if not file.is_file():
        raise ConfigError(f"{kit} is no startup kit of an admin user: {file} is not there")
    return str(read_json(file).get("admin", {}).get("username", ""))


def list_jobs(kit: Path, limit: int = 10, job_id: str | None = None) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Ask the server for its newest jobs, and when certificates end (:func:`.status_checked`)."""
    with open_session(kit) as session:
        told = session.check_status("server").get(CERTIFICATES)
        ends = {plain(str(who)): end for who, end in dict(told or {}).items() if isinstance(end, float)}
        newest = None if job_id else session.list_jobs(detailed=True, limit=limit, reverse=True)
        entries = [session.get_job_meta(job_id)] if job_id else newest or []
        listed_whole = ("RUNNING", "FINISHED:COMPLETED")  # of the others the list leaves out the reason
        entries = [e if e.get("status") in listed_whole else session.get_job_meta(e["job_id"]) for e in entries]
        return [_with_progress(session, entry) for entry in entries], ends


def wait_for_sites(session: Any, sites: Sequence[str], min_sites: int | None, seconds: float = WAIT_SECONDS) -> None:
    """Wait for these sites, in the end for ``min_sites`` of them: a job never takes in one that connects later."""
    until, before = time.monotonic() + seconds, None
    while True:
        connected = {client.name for client in session.get_system_info().client_info}
        if not (missing := sorted(set(sites) - connected)):
            return
        if time.monotonic() >= until:
            break
        if missing != before:
            print(f"not connected: {', '.join(missing)}; waiting up to {seconds:.0f} s", file=sys.stderr, flush=True)
            before = missing
        time.sleep(2)
    if min_sites is None or len(sites) - len(missing) < min_sites:
        cure = "start them, or go on without them by --min-sites"
        raise FedTARError(f"not connected after {seconds:.0f} s: {', '.join(missing)}; {cure}. Nothing was submitted")


def watch_job(kit: Path, job_id: str, say: Callable[[dict[str, Any]], object]) -> str:
    """Follow a job until it ends."""
    before = None
    with open_session(kit) as session:
        while True:
            now = _with_progress(session, session.get_job_meta(job_id))
            progress = {k: v for k, v in (now.get("progress") or {}).items() if k != "seconds"}
            if (key := (now["status"], now["reason"], progress)) != before:
                say(now)
                before = key
            if now["status"].startswith(FINISHED):
                return str(now["status"])
            time.sleep(2)


def ending(ends: Mapping[str, float]) -> list[str]:
    """Name whose certificate ends soon, or has ended lately, for the terminal."""
    now, lines = time.time(), []
    for who, end in ((who, end) for who, end in sorted(ends.items()) if abs(end - now) < SOON_SECONDS):
        does, day = "ends" if end > now else "ended", time.strftime("%Y-%m-%d", time.gmtime(end))
        lines.append(plain(f"CERTIFICATE of {who} {does} on {day}: renew it"))
    return lines


def metrics(jobs: Sequence[Mapping[str, Any]], ends: Mapping[str, float]) -> str:
    """Write running jobs and certificates for Prometheus' node exporter (``--collector.textfile``)."""
    values = {"fedtar_status_time_seconds": time.time()}
    values |= {f"fedtar_certificate_end_seconds{{site={quoted(who)}}}": end for who, end in ends.items()}
    for job in jobs:
        progress, label = job.get("progress") or {}, f"job_id={quoted(job['id'])}"  # `job` is the scraper's own
        values |= {f"fedtar_alarms{{{label}}}": len(progress.get("alarms", ()))} if progress else {}
        for name in ("round", "rounds") if progress.get("task") else ():
            values[f"fedtar_job_{name}{{{label}}}"] = progress[name]
        for site, does in progress.get("sites", {}).items():
            values[f"fedtar_site_absent{{{label},site={quoted(site)}}}"] = does.startswith(("absent", "refused"))
        for site, when in progress.get("last_answer", {}).items():
            values[f"fedtar_site_answer_seconds{{{label},site={quoted(site)}}}"] = when
        for way, size in progress.get("bytes", {}).items():
            values[f"fedtar_job_bytes{{{label},way={quoted(way)}}}"] = size
    return gauges(values)


def job_line(job: Mapping[str, Any]) -> str:
    """Describe a job for the terminal. Unprintable characters of the submitter's names are replaced."""
    progress = job.get("progress") or {}
    text = plain(f"{job['id']}  {job['status']:<22} {job['name']}")
    notes = [f"reason: {job['reason']}"] if job.get("reason") else []
    text = "\n  ".join([text, *map(plain, notes + [f"ALARM {alarm}" for alarm in progress.get("alarms") or ()])])
    if not progress.get("task"):
        return text
    sites = ", ".join(f"{site} {word}" for site, word in progress["sites"].items())
    numbers = ""
    for label, values in (progress.get("numbers") or {}).items():
        numbers += f"; {label} {' '.join(f'{value:.3f}' for value in values)}"
    where = f"round {progress['round']} of {progress['rounds']}, step {progress['step']} of {progress['time_steps']}"
    losses = progress.get("validation_loss") or {}
    last = f"; validation loss {losses[max(losses, key=int)]:.4f}" if losses else ""
    now = plain(f"{progress['task']}: {where}, {progress['seconds']:.0f} s; {sites}{numbers}{last}")
    return f"{text}\n  {now}"


def _with_progress(session: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    reason = str((meta.get("schedule_history") or [""])[-1])  # why a job waits
    if meta.get("status") != "SUBMITTED":  # or ended as it did
        detail = meta.get("job_deploy_detail") or [] if meta.get("status") == "FINISHED:FAILED_TO_RUN" else []
        reason = str(meta.get(REASON) or "; ".join(str(each) for each in detail if not str(each).endswith(": OK")))
    entry = {
        "id": meta.get("job_id"),
        "name": meta.get("job_name") or meta.get("name"),
        "status": str(meta.get("status")),
        "submitted": meta.get("submit_time_iso") or meta.get("submit_time"),
        "submitter": meta.get("submitter_name"),
        "duration": meta.get("duration"),
        "reason": reason,
    }
    if entry["status"] == "RUNNING":
        entry["progress"] = _progress(session, str(entry["id"]))
        metrics([entry], {})  # the session tells of a malformed report, for which these fail
        job_line(entry)
    return entry


def _progress(session: Any, job_id: str) -> dict[str, Any] | None:
    """What the job's controller reports of itself; None while it starts or has just ended."""
    try:
        todo = [session.show_stats(job_id, "server")]
    except Exception:  # FLARE raises when the job's process has not started yet, or has ended
        return None
    for stats in todo:  # FLARE nests them by process
        if isinstance(stats, Mapping):
            if isinstance(stats.get(STATS_GROUP), Mapping):
                return dict(stats[STATS_GROUP])
            todo.extend(stats.values())
    return None
