"""The parts of the page that are charts: alpha, losses, scores over rounds, how far the model moved."""

from __future__ import annotations

from collections.abc import Sequence

from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.reporting.format import NOTHING, number, score, shown, significant, text
from fedtar_flare.reporting.plots import Guide, Series, legend_of, line_chart
from fedtar_flare.reporting.run import Cell, Evaluation, Run, Step


def alpha_section(run: Run) -> str:
    """Alpha over rounds and steps, with the bounds of its form."""
    alphas = run.alphas()
    sigmoid = run.settings.get("alpha_form") == "sigmoid"

    def lines(change: bool) -> list[Series]:
        start = alphas[0][1] if alphas and change else ()
        return [
            Series(
                f"step {t + 1}",
                [
                    (r, values[t] - start[t] if start else values[t], f"step {t + 1} after round {r}: {values[t]:.4f}")
                    for r, values in alphas
                    if t < len(values)
                ],
                "step",
                t,
            )
            for t in range(run.time_steps)
        ]

    uniform = [] if sigmoid or not run.time_steps else [Guide(1 / run.time_steps, "1/T")]
    bounds = "each between 0 and 1 (sigmoid)" if sigmoid else "between 0 and 1, sum 1 (softmax)"
    form = (
        "Under a sigmoid each step's alpha moves freely between 0 and 1."
        if sigmoid
        else "Under a softmax the alphas of a round sum to one: where one rises, another falls."
    )
    charts = [
        line_chart(
            f"Alpha per time step, {bounds}",
            lines(False),
            x_label="round",
            y_label="alpha",
            y_range=(0.0, 1.0),
            guides=[*uniform, Guide(1.0, "upper bound")],
        ),
        line_chart(
            "Change of alpha since the start",
            lines(True),
            x_label="round",
            y_label="alpha − initial alpha",
            guides=[Guide(0.0, "")],
        ),
    ]
    lead = f"How much of each visit step's residual enters the shared adapter (Eq. 7 and 8). {form}"
    return section("alpha", "Alpha", lead, _charts(charts))


def loss_section(run: Run) -> str:
    """Training loss per site over (round, step), validation loss per round."""
    training = [
        Series(
            site,
            [
                (
                    _at(run, one),
                    one.sites[site].train_loss if site in one.sites else None,
                    f"{site}, {_name(one)}: {number(one.sites[site].train_loss) if site in one.sites else NOTHING}",
                )
                for one in run.steps
            ],
            "site",
            i,
        )
        for i, site in enumerate(run.sites)
    ]
    validation = [
        Series(
            site,
            [
                (
                    outer.round,
                    outer.sites[site].validation_loss if site in outer.sites else None,
                    f"{site}, round {outer.round}: "
                    f"{number(outer.sites[site].validation_loss) if site in outer.sites else NOTHING}",
                )
                for outer in run.outers
            ],
            "site",
            i,
        )
        for i, site in enumerate(run.sites)
    ]
    pooled = Series(
        "all reports",
        [
            (o.round, o.validation_loss, f"all reports, round {o.round}: {number(o.validation_loss)}")
            for o in run.outers
        ],
        "ink",
    )
    charts = [
        line_chart(
            "Training loss, nats per token",
            training,
            x_label="round (a point per time step)",
            y_label="token loss",
            x_range=_rounds(run),
        ),
        line_chart(
            "Validation loss, nats per token",
            [*validation, pooled],
            x_label="round",
            y_label="token loss",
            x_range=_rounds(run),
        ),
    ]
    lead = (
        "Training: mean over a site's local updates at one step; the line breaks where the site sent nothing. "
        "Validation: mean over the reports of validation patients after the round's last step."
    )
    return section("loss", "Loss", lead, _charts(charts))


def curves(run: Run) -> str:
    """Scores over rounds: per score, a small chart for each site with a line per step."""
    parts = []
    sites = sorted({site for one in run.evaluations for site in one.sites})
    for name in (one.name for one in SCORES.values() if one.curve):
        known = [v for one in run.evaluations for site in sites if (v := _values(one, site, name))]
        top = max((shown(name, value) or 0.0 for values in known for value in values.values()), default=None)
        if top is None:
            continue
        charts = []
        lines: list[Series] = []
        for site in sites:
            lines = _score_lines(run, site, name)
            charts.append(
                line_chart(
                    site,
                    lines,
                    x_label="round",
                    y_label=SCORES[name].label,
                    x_range=_rounds(run),
                    y_range=(0.0, 1.06 * top or 1.0),
                    legend=False,
                    size=(270, 170),
                )
            )
        times = " × 100" if SCORES[name].scale == 100 else ""
        parts.append(f"<h3>{SCORES[name].label}{times}</h3>{legend_of(lines)}{_charts(charts, 'small')}")
    return "".join(parts)


def movement_section(run: Run) -> str:
    """Norms of mean update and residual per step, and of the gradient of psi per round."""
    skipped = [(_at(run, one), f"{_name(one)}: skipped, nobody sent an update") for one in run.steps if one.skipped]

    def line(name: str, index: int, values: Sequence[float | None]) -> Series:
        points = [
            (_at(run, one), None if one.skipped else value, f"{name}, {_name(one)}: {significant(value)}")
            for one, value in zip(run.steps, values, strict=True)
        ]
        return Series(name, points, "site", index)

    gradient = Series(
        "gradient",
        [(o.round, o.psi_grad_norm, f"round {o.round}: {significant(o.psi_grad_norm)}") for o in run.outers],
        "site",
        2,
    )
    charts = [
        line_chart(
            "Update and step, Euclidean norm over the shared adapter",
            [
                line("mean update of the sites", 0, [one.update_norm for one in run.steps]),
                line("step taken, alpha times it", 1, [one.residual_norm for one in run.steps]),
            ],
            x_label="round (a point per time step)",
            y_label="norm",
            x_range=_rounds(run),
            crosses=skipped,
        ),
        line_chart(
            "Gradient of the validation loss in psi, Euclidean norm",
            [gradient],
            x_label="round",
            y_label="norm",
            x_range=_rounds(run),
        ),
    ]
    lead = "Alpha times the sites' mean update (Eq. 6) enters the shared adapter as the step's residual (Eq. 7)."
    lead += " A cross on the axis is a step that was skipped." if skipped else ""
    return section("movement", "How far the adapter moved", lead, _charts(charts))


def section(name: str, title: str, lead: str, content: str) -> str:
    """One section of the page; ``lead`` is plain text."""
    return f'<section id="{name}"><h2>{text(title)}</h2><p class="lead">{text(lead)}</p>{content}</section>'


def _charts(charts: list[str], kind: str = "") -> str:
    return f'<div class="charts {kind}">{"".join(charts)}</div>'


def _rounds(run: Run) -> tuple[float, float]:
    """The x axis that charts over rounds share: from before the first round to the last one begun."""
    begun = [step.round for step in run.steps] + [one.round for one in run.evaluations]
    return float(run.first_round - 1), float(max(begun, default=run.first_round))


def _at(run: Run, step: Step) -> float:
    """Place of a step on the axis of rounds: the last step of round r lies at r."""
    return round(step.round - 1 + step.step / max(1, run.time_steps), 4)


def _name(step: Step) -> str:
    return f"round {step.round}, step {step.step}"


def _values(evaluation: Evaluation, site: str, name: str) -> dict[int | None, float]:
    """Raw values of one score at one site: by step, and under None over all steps."""
    if site not in evaluation.sites:
        return {}
    scores = evaluation.sites[site]
    cells: list[tuple[int | None, Cell]] = [*scores.steps.items(), (None, scores.all)]
    return {step: cell.scores[name] for step, cell in cells if name in cell.scores}


def _score_lines(run: Run, site: str, name: str) -> list[Series]:
    def line(label: str, step: int | None) -> Series:
        values = [(one.round, _values(one, site, name).get(step)) for one in run.evaluations]
        points = [(r, shown(name, v), f"{site}, {label}, round {r}: {score(name, v)}") for r, v in values]
        return Series(label, points, "ink" if step is None else "step", 0 if step is None else step - 1)

    return [*(line(f"step {t}", t) for t in range(1, run.time_steps + 1)), line("all steps", None)]
