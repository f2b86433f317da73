"""The model card of a trained adapter: what it is, what it learnt from, how it scored, and what it is not for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from fedtar_flare.files import write_text
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import Evaluation
from fedtar_flare.reporting.format import flat, number, plain, scaling, score, size, times, visits
from fedtar_flare.reporting.run import SPLITS, Run
from fedtar_flare.reporting.scores import Row, measured, score_rows, start_name
from fedtar_flare.reporting.section import own_sections

CARD_FILE = "README.md"
NOT_STATED = "not stated"

_USE = """\
Drafts radiology reports for research on federated report generation. **Not for clinical use**: not a medical device,
not validated for diagnosis, and nothing that it writes may reach a patient's record without a radiologist's own
reading.

Limits:

- It can leave out findings, invent findings, and write fluent text that is wrong. The scores below measure likeness
  to reference reports, not safety.
- It knows the sites, scanners, patients and report styles that it was trained on, and no others.
- Scores were taken with the site's own personal part where the method has one. That part **is not in this
  folder** and never left its site: a hospital outside the run uses the shared adapter alone and should expect less.
- No report and no image left a site, but the adapter was fitted to them, without a formal privacy guarantee: treat it
  as derived from patient data."""


def write_model_card(run: Run, folder: Path | str) -> Path:
    """Write ``README.md`` into the adapter's folder, which must exist; returns its path.

    The card leaves the server with the adapter, so counts under ``min_cell`` are not told exactly. Base model and
    licence are given as the run's record states them, else as not stated.
    """
    return write_text(Path(folder) / CARD_FILE, model_card(run))


def model_card(run: Run) -> str:
    """The card as Markdown with the YAML head that model hubs read."""
    chosen = next((e for e in run.evaluations if e.round == run.best_round), run.final)
    return (
        "\n\n".join(
            [
                _head(run),
                f"# Shared adapter of run {_md(run.start.run_id)}",
                f"LoRA weights in PEFT's format, trained at {len(run.start.sites)} site(s). Method: {_md(run.title)}. "
                f"{_which(run)} They load with `PeftModel.from_pretrained(base_model, folder)`.",
                "## Intended use and limits",
                _USE,
                "## Model",
                _table(("", ""), _model(run)),
                "## Training data",
                _data(run),
                "## Scores",
                _scores(run, chosen),
                "## Settings",
                _table(("setting", "value"), [*flat(run.start.settings), *run.start.versions.items()]),
            ]
        )
        + "\n"
    )


def _head(run: Run) -> str:
    model = run.start.model
    fields: dict[str, object] = {"library_name": "peft", "pipeline_tag": "image-to-text"}
    if parts := _base_parts(run):
        fields["base_model"] = parts
    if model.get("license"):
        fields["license"] = plain(model["license"])
    fields["tags"] = ["lora", "federated-learning", "radiology", "report-generation"]
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---"])


def base_model(run: Run) -> str:
    """Name of the base model, as far as the settings state it."""
    preset = run.start.model.get("preset")
    parts = [f"fedtar_flare preset {plain(preset)}"] if preset else []
    return ", ".join([*parts, *_base_parts(run)]) or NOT_STATED


def _base_parts(run: Run) -> list[str]:
    """Published models that the base is made of."""
    model = run.start.model
    return [plain(model[name]) for name in ("base_model", "encoder_name", "decoder_name") if model.get(name)]


def _which(run: Run) -> str:
    if run.best_round is None:
        return "They are those of the last round (there was no validation patient to choose by)."
    return f"They are those of round {run.best_round} of {run.start.rounds}, the best by validation loss."


def _model(run: Run) -> list[tuple[str, str]]:
    start, one = run.start, run.start.exchange
    full = f" (the whole model: {times(one.full_bytes, one.bytes)} as much)" if one.full_bytes else ""
    loss = next((validation.loss for validation in run.validations if validation.round == run.best_round), None)
    rounds = f"{len(run.validations)} round(s) of {start.time_steps} time steps"
    return [
        ("base model", base_model(run)),
        ("licence of the base model", str(start.model.get("license") or NOT_STATED)),
        ("adapter", f"{one.parameters} values in {one.tensors} tensors, {size(one.bytes)} in float32{full}"),
        ("validation loss", f"{number(loss, 4)} nats per token"),
        ("run", f"{start.run_id}, {start.time}, {run.status}, {rounds}"),
        *(line for section in own_sections(run) for line in section.lines),
    ]


def _data(run: Run) -> str:
    start = run.start
    if not start.counts:
        return "Not recorded."
    steps = [f"step {t}" for t in range(1, start.time_steps + 1)]
    rows = [
        (site, split, *(visits(n, start.min_cell) for n in counts[split]))
        for site, counts in sorted(start.counts.items())
        for split in SPLITS
        if counts.get(split)
    ]
    return "Visits per site and time step. Splits are by patient; nothing was learnt on test patients.\n\n" + _table(
        ("site", "split", *steps), rows
    )


def _scores(run: Run, chosen: Evaluation | None) -> str:
    rows = score_rows(run, chosen)
    if not rows:
        return "The run has no evaluation."
    until = f" → round {chosen.round}" if chosen else ""
    other = (
        f" The adapter is that of round {run.best_round}, which was not evaluated."
        if chosen and run.best_round not in (None, chosen.round)
        else ""
    )
    scale = scaling(measured(rows))
    lead = (
        f"Test patients, {start_name(run)}{until}; n is the number of reports.{f' {scale}' if scale else ''}"
        f"{other} CIDEr depends on the corpus and must not be compared between sites; the mean is over the sites' own "
        "scores."
    )
    off = score_rows(run, chosen, generic=True)
    more = ["### Without the personal part", _score_table(off)] if off else []
    return "\n\n".join([lead, _score_table(rows), *more])


def _score_table(rows: Sequence[Row]) -> str:
    names = measured(rows)
    body = []
    for row in rows:
        pairs = [(score(name, row.before.get(name)), score(name, row.after.get(name))) for name in names]
        values = [" → ".join(pair) if row.before or row.after else "" for pair in pairs]
        body.append((row.site, "all" if row.step is None else str(row.step), row.reports, *values))
    return _table(("site", "step", "n", *(SCORES[name].label for name in names)), body)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(_md(cell) if i != 1 else cell for cell in line)} |" for i, line in enumerate(lines)
    )


def _md(value: object) -> str:
    """Text escaped for Markdown, table cells included."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", plain(value))
