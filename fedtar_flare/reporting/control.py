"""What each hospital alone reaches, to stand beside a run: kept numbers of a suite, or a run that the user names."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import read_json, write_json
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.scores import Row, overall

CONTROL_FILE = "control.json"  # in a run's folder, of the run that ``fedtar report --alone`` named
SHIPPED = Path(__file__).with_name(CONTROL_FILE)  # of the shipped job, as ``python -m tools.keep_control`` writes it


def joined(run: Run) -> bool:
    """Whether several hospitals learn from each other; a method that this version does not know is assumed to share."""
    return (run.method is None or run.method.contract.shares) and len(run.start.sites) > 1


def control_of(run: Run) -> Row | None:
    """Mean of the hospitals, each alone; ``site`` says where it comes from. None where nothing is known of this job."""
    row = overall(run)
    if row is None or not joined(run):
        return None
    for file in (run.folder / CONTROL_FILE, SHIPPED):
        if file.is_file() and (known := read_json(file)).get("job") == digest(run):
            return Row(known["source"], None, row.reports, row.n, {}, known["scores"])
    return None


def keep_control(run: Run, other: Run) -> Path:
    """Keep, beside a run, what its hospitals reach in another run, in which they shared nothing."""
    row, tested = overall(other), [{s: n["test"] for s, n in each.start.counts.items()} for each in (run, other)]
    if joined(other) or row is None or not row.after or tested[0] != tested[1]:
        text = "--alone takes a scored run of local_patient (or local) at the same hospitals, with the same test visits"
        raise ConfigError(f"{other.folder}: {text}")
    return write_control(run.folder / CONTROL_FILE, run, f"run {other.start.run_id}", row.after)


def write_control(file: Path, run: Run, source: str, scores: Mapping[str, float]) -> Path:
    """Write what the hospitals of a run reach alone; it holds for runs of the very same job."""
    return write_json(file, {"job": digest(run), "source": source, "scores": dict(scores)})


def digest(run: Run) -> str:
    """Digest of the job that a run is of: method, settings with their defaults, base model, hospitals, visits."""
    start, settings = run.start, run.start.settings | {"sites": run.site_settings}
    job = [start.method, settings, start.model.get("fingerprint"), start.sites, start.counts]
    return hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()[:16]
