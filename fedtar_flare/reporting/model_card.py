"""The model card beside a trained adapter: what it is, what it learnt from, how it scored, and what it is not for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtar_flare.reporting.format import flat, number, plain, score, size, times, visits
from fedtar_flare.reporting.run import SPLITS, Evaluation, Run
from fedtar_flare.reporting.scores import MEAN, Row, mean_row, measured, score_rows, start_name

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
- Scores were taken with the site's own patient-adaptive part where the run has one. That part **is not in this
  folder** and never left its site: a hospital outside the run uses the shared adapter alone and should expect less.
- No report and no image left a site, but the adapter was fitted to them, without a formal privacy guarantee: treat it
  as derived from patient data."""


def write_model_card(run: Run, folder: Path | str) -> Path:
    """Write ``README.md`` beside the adapter's files.

    Base model and licence are given as the run's settings state them (``model.preset``, ``model.base_model``,
    ``model.encoder_name``, ``model.decoder_name``; ``model.license``); what they do not state is said to be not stated.
    The card leaves the server with the adapter, so counts under ``min_cell`` are not told exactly.

    Args:
        run: the run that the adapter comes from.
        folder: the adapter's folder, which must exist.

    Returns:
        the card's path.
    """
    path = Path(folder) / CARD_FILE
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(model_card(run), encoding="utf-8")
    os.replace(temporary, path)  # noqa: PTH105
    return path


def model_card(run: Run) -> str:
    """The card as Markdown with a YAML head, which model hubs read."""
    chosen = next((e for e in run.evaluations if e.round == run.best_round), run.final)
    return (
        "\n\n".join(
            [
                _head(run),
                f"# Shared adapter of run {_md(run.run_id)}",
                f"LoRA weights in PEFT's format, trained at {len(run.sites)} site(s) by federated temporal adaptation "
                f"(FedTAR). {_which(run)} They load with `PeftModel.from_pretrained(base_model, folder)`.",
                "## Intended use and limits",
                _USE,
                "## Model",
                _table(("", ""), _model(run)),
                "## Training data",
                _data(run),
                "## Scores",
                _scores(run, chosen),
                "## Settings",
                _table(("setting", "value"), [*flat(run.settings), *(run.versions.items())]),
            ]
        )
        + "\n"
    )


def _head(run: Run) -> str:
    model = _model_settings(run)
    fields: dict[str, object] = {"library_name": "peft", "pipeline_tag": "image-to-text"}
    if parts := _base_parts(run):
        fields["base_model"] = parts
    if model.get("license"):
        fields["license"] = plain(model["license"])
    fields["tags"] = ["lora", "federated-learning", "radiology", "report-generation"]
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---"])


def base_model(run: Run) -> str:
    """Name of the base model as far as the settings state it."""
    preset = _model_settings(run).get("preset")
    parts = [f"fedtar_flare preset {plain(preset)}"] if preset else []
    return ", ".join([*parts, *_base_parts(run)]) or NOT_STATED


def _base_parts(run: Run) -> list[str]:
    """Published models that the base is made of."""
    model = _model_settings(run)
    return [plain(model[name]) for name in ("base_model", "encoder_name", "decoder_name") if model.get(name)]


def _which(run: Run) -> str:
    if run.best_round is None:
        return "They are those of the last round (there was no validation patient to choose by)."
    return f"They are those of round {run.best_round} of {run.rounds}, the one with the lowest validation loss."


def _model(run: Run) -> list[tuple[str, str]]:
    one = run.exchange
    full = f" (the whole model: {times(one.full_bytes, one.bytes)} as much)" if one.full_bytes else ""
    loss = next((outer.validation_loss for outer in run.outers if outer.round == run.best_round), None)
    return [
        ("base model", base_model(run)),
        ("licence of the base model", str(_model_settings(run).get("license") or NOT_STATED)),
        ("adapter", f"{one.parameters} values in {one.tensors} tensors, {size(one.bytes)} in float32{full}"),
        ("validation loss", f"{number(loss, 4)} nats per token"),
        (
            "run",
            f"{run.run_id}, {run.started}, {run.status}, {len(run.outers)} round(s) of {run.time_steps} time steps",
        ),
    ]


def _data(run: Run) -> str:
    if not run.counts:
        return "Not recorded."
    steps = [f"step {t}" for t in range(1, run.time_steps + 1)]
    rows = [
        (site, split, *(visits(n, run.min_cell) for n in counts[split]))
        for site, counts in sorted(run.counts.items())
        for split in SPLITS
        if counts[split]
    ]
    return (
        "Visits per site and time step. Splits are by patient; alpha was learnt on validation patients, test patients "
        "were only scored.\n\n" + _table(("site", "split", *steps), rows)
    )


def _scores(run: Run, chosen: Evaluation | None) -> str:
    rows = score_rows(run, chosen)
    if not rows:
        return "The run has no evaluation."
    mean = mean_row(rows)
    body, labels = [], measured(rows)
    for row in [*rows, *([mean] if mean else [])]:
        pairs = [(score(name, row.before.get(name)), score(name, row.after.get(name))) for name in labels]
        values = [" → ".join(pair) if row.before or row.after else "" for pair in pairs]
        body.append(
            (row.site, "all" if row.step is None else str(row.step), _reports(row, rows, run.min_cell), *values)
        )
    until = f" → round {chosen.round}" if chosen else ""
    other = (
        f" The adapter is that of round {run.best_round}, which was not evaluated."
        if chosen and run.best_round not in (None, chosen.round)
        else ""
    )
    return (
        f"Test patients, {start_name(run)}{until}; n is the number of reports. All scores but token loss "
        f"are × 100.{other} CIDEr depends on the corpus and must not be compared between sites; the mean "
        "is over the sites' own scores.\n\n" + _table(("site", "step", "n", *labels.values()), body)
    )


def _reports(row: Row, rows: Sequence[Row], min_cell: int) -> str:
    """n of a row; a total must not give away the small cell that it holds."""
    parts = [one.n for one in rows if one.step is not None and row.site in (one.site, MEAN)]
    if row.step is None and any(0 < n < min_cell for n in parts):
        return f"over {sum(n for n in parts if n >= min_cell)}"
    return visits(row.n, min_cell)


def _model_settings(run: Run) -> Mapping[str, object]:
    model = run.settings.get("model")
    return model if isinstance(model, Mapping) else {}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(_md(cell) if i != 1 else cell for cell in line)} |" for i, line in enumerate(lines)
    )


def _md(value: object) -> str:
    """Text as Markdown shows it: nothing in it is taken for markup or for a cell's end."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", plain(value))
