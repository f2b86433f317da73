"""The model card of a trained adapter: its model, training data, scores, and intended use."""

import json
from pathlib import Path

from markupsafe import Markup

from fedtar_flare.core.files import write_text
from fedtar_flare.core.text import plain
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.models.adapters.hub import HUB_ID
from fedtar_flare.reporting.alarms import alarm_section
from fedtar_flare.reporting.format import decimals, flat, number, size, times, visits
from fedtar_flare.reporting.model_audit import MEASURES, Vote, read_votes
from fedtar_flare.reporting.render import render_markdown
from fedtar_flare.reporting.run import SPLITS, Run
from fedtar_flare.reporting.scores import groups, overall, score_rows, start_name
from fedtar_flare.reporting.section import method_sections
from fedtar_flare.reporting.verdict import MOST, key_numbers, verdict

NOT_STATED = "not stated"


def write_model_card(run: Run, folder: Path | str) -> Path:
    """Write ``README.md`` beside an adapter, with which it leaves the server: small counts are not given exactly."""
    return write_text(Path(folder) / "README.md", model_card(run))


def model_card(run: Run) -> str:
    """The card as Markdown with the YAML head that model hubs read."""
    start = run.start
    votes = read_votes(run.folder, run.start.run_id)
    rows, off = score_rows(run), score_rows(run, generic=True)
    return render_markdown(
        "card.md",
        run=run,
        start=start,
        head=_head(run),
        model=_model(run),
        steps=[f"step {t}" for t in range(1, start.time_steps + 1)],
        visits=[
            (site, split, *(visits(n, start.min_cell) for n in counts[split]))
            for site, counts in sorted(start.counts.items())
            for split in SPLITS
            if counts.get(split)
        ],
        verdict=verdict(run),
        verdict_rows=key_numbers(run)[:MOST],
        began=start_name(run),
        tables=groups(rows),
        off=groups(off),
        votes=votes,
        dossier_head=["site", "vote", "data and patients", "epsilon", "approved job", "version", "signed"],
        dossiers=[*map(_dossier, votes)],
        audit_head=["site", "part", *MEASURES.values()],
        audit_rows=[row for vote in votes for row in vote.rows()],
        settings=[*flat(start.settings), *start.versions.items()],
    )


def _dossier(vote: Vote) -> tuple[str, ...]:
    answer, epsilon = "yes" if vote.yes else "no", [f"{value:g} ({of})" for of, value in vote.epsilon.items()]
    held = f"{answer}; held: {', '.join(vote.reasons)}" if vote.reasons else answer
    card = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in vote.data.items())
    return vote.site, held, card, ", ".join(epsilon) or "none", vote.approval[:12] or "none", vote.version, vote.time


def base_model(run: Run) -> str:
    """Name of the base model, as far as the settings give it."""
    preset, parts = run.start.model.get("preset"), _base_parts(run)
    if preset and f"preset '{preset}'" not in " ".join(parts):
        parts = [f"fedtar_flare preset {plain(preset)}", *parts]
    return ", ".join(parts) or NOT_STATED


def _base_parts(run: Run) -> list[str]:
    """Published models that the base is made of."""
    model = run.start.model
    return [plain(model[name]) for name in ("base_model", "encoder_name", "decoder_name") if model.get(name)]


def _head(run: Run) -> Markup:
    fields: dict[str, object] = {"library_name": "peft", "pipeline_tag": "image-to-text"}
    if parts := [part for part in _base_parts(run) if HUB_ID.fullmatch(part)]:
        fields["base_model"] = parts
    if run.start.model.get("license"):
        fields["license"] = plain(run.start.model["license"])
    fields["tags"] = ["lora", "federated-learning", "radiology", "report-generation"]
    if (row := overall(run)) and row.after and not run.checkpoint_note:  # hubs show scores of this very adapter
        metrics = [
            {"type": name, "name": kind.label, "value": round(kind.scale * row.after[name], decimals(name, row.n))}
            for name, kind in SCORES.items()
            if name in row.after
        ]
        about = {"task": {"type": "image-to-text"}, "dataset": {"name": f"test patients, {row.site}", "type": "other"}}
        fields["model-index"] = [{"name": run.start.run_id, "results": [about | {"metrics": metrics}]}]
    return Markup("\n".join(f"{name}: {json.dumps(value)}" for name, value in fields.items()))


def _model(run: Run) -> list[tuple[str, str]]:
    start, sizes = run.start, run.start.exchange
    full = f" (the whole model: {times(sizes.full_bytes, sizes.bytes)} as much)" if sizes.full_bytes else ""
    loss = next((validation.loss for validation in run.validations if validation.round == run.best_round), None)
    rounds = f"{len(run.validations)} round(s) of {start.time_steps} time steps"
    signs = alarm_section(run)
    return [
        *(signs.lines if signs else ()),
        ("base model", base_model(run)),
        ("licence of the base model", str(start.model.get("license") or NOT_STATED)),
        ("adapter", f"{sizes.parameters} values in {sizes.tensors} tensors, {size(sizes.bytes)} in float32{full}"),
        ("validation loss", f"{number(loss, 4)} nats per token"),
        ("run", f"{start.run_id}, {start.time}, {run.status}, {rounds}"),
        *(line for section in method_sections(run) for line in section.lines),
    ]
