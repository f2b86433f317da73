"""FedTAR's sections of the run page: alpha over rounds with its outer steps, and the residual steps."""

from __future__ import annotations

from markupsafe import Markup

from fedtar_flare.methods.fedtar.events import Alphas, Outer, Residual
from fedtar_flare.methods.fedtar.policy import FIXED
from fedtar_flare.reporting.format import number, significant
from fedtar_flare.reporting.plots import Chart, Guide, Series
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, charts, left_out, norms, over_steps, table


def alpha(run: Run) -> Section:
    """alpha over rounds and steps with the bounds of its form, and one row per outer step."""
    alphas = [(event.round, event.alpha) for event in run.events(Alphas)[:1]]
    alphas += [(event.round, event.alpha_after) for event in run.events(Outer)]
    kind = run.start.settings.get("alpha_form")
    steps, sigmoid = run.start.time_steps, kind == "sigmoid"
    bounds = "between 0 and 1, sum 1 (softmax)"
    form = "Under a softmax the alphas of a round sum to one: where one rises, another falls."
    if sigmoid:
        bounds = "each between 0 and 1 (sigmoid)"
        form = "Under a sigmoid each step's alpha moves freely between 0 and 1."
    elif kind in FIXED:
        bounds, form = f"not learnt ({kind})", "Here it is not learnt."
    uniform = [] if sigmoid or not steps else [Guide(1 / steps, "1/T")]
    figures = [
        Chart(
            f"Alpha per time step, {bounds}",
            [_line(alphas, t) for t in range(steps)],
            x_label="round",
            y_label="alpha",
            y_range=(0.0, 1.0),
            guides=[*uniform, Guide(1.0, "upper bound")],
        ),
        Chart(
            "Change of alpha since the start",
            [_line(alphas, t, since_start=True) for t in range(steps)],
            x_label="round",
            y_label="alpha − initial alpha",
            guides=[Guide(0.0, "")],
        ),
    ]
    lead = (
        f"How much of each visit step's residual enters the shared adapter (Eq. 7 and 8). {form} Once per round alpha "
        "moves along the gradient of the validation loss, from T numbers that each site sends."
    )
    lines = (("alpha, steps 1 to T", f"{_text(alphas[0][1])} -> {_text(alphas[-1][1])}"),) if alphas else ()
    return Section("alpha", "Alpha", lead, charts(figures) + _outer_steps(run), lines, optimisation=True)


def residual(run: Run) -> Section:
    """Norms of the step taken at each time step."""
    taken = [(event.round, event.step, event.residual_norm) for event in run.events(Residual)]
    line = norms(run, "step taken, alpha times the mean update", taken, index=1)
    figure = over_steps(run, "Step taken, Euclidean norm over the shared adapter", [line], "norm")
    lead = "Alpha times the sites' mean update (Eq. 6) enters the shared adapter as the step's residual (Eq. 7)."
    lead += " A cross on the axis is a step that was skipped." if figure.crosses else ""
    return Section("residual", "Residual steps", lead, charts([figure]), optimisation=True)


SECTIONS = (alpha, residual)


def _line(alphas: list[tuple[int, list[float]]], t: int, since_start: bool = False) -> Series:
    points = [
        (r, values[t] - (alphas[0][1][t] if since_start else 0.0), f"step {t + 1} after round {r}: {values[t]:.4f}")
        for r, values in alphas
        if t < len(values)
    ]
    return Series(f"step {t + 1}", points, "step", t)


def _outer_steps(run: Run) -> Markup:
    outers = run.events(Outer)
    rows = [(str(event.round), significant(event.psi_grad_norm), _text(event.alpha_after)) for event in outers]
    head = ("round", "‖gradient of psi‖", "alpha after it, steps 1 to T")
    return table(head, rows, left={2}, empty="No round is complete.") + left_out(
        [(event.round, event.left_out) for event in outers]
    )


def _text(values: list[float]) -> str:
    return " ".join(map(number, values))
