"""FedTAR's sections of the run page, alpha and the residual steps; and a site's own page of its patients' phi."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtar_flare.core.files import PRIVATE, write_text
from fedtar_flare.data.cohort import Sample
from fedtar_flare.methods.fedtar.events import Alphas, Outer, Residual
from fedtar_flare.methods.fedtar.policy import FIXED
from fedtar_flare.reporting.examples import AGES, age_of, sex_of
from fedtar_flare.reporting.format import number, significant
from fedtar_flare.reporting.plots import Chart, Guide, Series, scatter, tsne
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, charts, left_out, on_axis, over_steps, table

MOST_POINTS = 500
"""Most patients on the page of phi: t-SNE of more takes longer than a second or two."""


def alpha(run: Run) -> Section:
    """alpha over rounds and steps with the bounds of its form, and one row per outer step."""
    alphas = [(event.round, event.alpha) for event in run.events(Alphas)[:1]]
    alphas += [(event.round, event.alpha_after) for event in run.events(Outer)]
    kind = run.start.settings.get("alpha_form")
    steps, sigmoid = run.start.time_steps, kind == "sigmoid"
    bounds = "between 0 and 1, sum 1 (softmax)"
    if sigmoid:
        bounds = "each between 0 and 1 (sigmoid)"
    elif kind in FIXED:
        bounds = f"not learnt ({kind})"
    uniform = [] if sigmoid or not steps else [Guide(1 / steps, "1/T")]
    values = []
    for t in range(steps):
        reached = [(r, row[t], f"step {t + 1} after round {r}: {row[t]:.4f}") for r, row in alphas if t < len(row)]
        values.append(Series(f"step {t + 1}", reached, "step", t))
    guides = [*uniform, Guide(1.0, "upper bound")]
    title = f"Alpha per time step, {bounds}"
    figure = Chart(title, values, x_label="round", y_label="alpha", y_range=(0.0, 1.0), guides=guides)
    outers = run.events(Outer)
    rows = [(str(event.round), significant(event.psi_grad_norm), _text(event.alpha_after)) for event in outers]
    head = ("round", "‖gradient of psi‖", "alpha after it, steps 1 to T")
    steps_taken = table(head, rows, left={2}, empty="No round is complete.")
    steps_taken += left_out([(event.round, event.left_out) for event in outers])
    lead = (
        "How much of each visit step's residual enters the shared adapter (Eq. 7 and 8). Once per round alpha moves "
        "along the gradient of the validation loss, from T numbers that each site sends, unless it is fixed."
    )
    lines = (("alpha, steps 1 to T", f"{_text(alphas[0][1])} -> {_text(alphas[-1][1])}"),) if alphas else ()
    return Section("alpha", "Alpha", lead, charts([figure]) + steps_taken, lines, optimisation=True)


def residual(run: Run) -> Section:
    """Norms of the step taken at each time step."""
    name, points = "step taken, alpha times the mean update", []
    skipped = {(step.round, step.step) for step in run.steps if step.skipped}  # where the line breaks
    for event in run.events(Residual):
        value = None if (event.round, event.step) in skipped else event.residual_norm
        tip = f"{name}, round {event.round}, step {event.step}: {significant(event.residual_norm)}"
        points.append((on_axis(run, event.round, event.step), value, tip))
    line = Series(name, points, index=1)
    figure = over_steps(run, "Step taken, Euclidean norm over the shared adapter", [line], "norm")
    lead = "Alpha times the sites' mean update (Eq. 6) enters the shared adapter as the step's residual (Eq. 7)."
    lead += " A cross on the axis is a step that was skipped." if figure.crosses else ""
    return Section("residual", "Residual steps", lead, charts([figure]), optimisation=True)


SECTIONS = (alpha, residual)


def _text(values: list[float]) -> str:
    return " ".join(map(number, values))


def write_phi_page(folder: Path, site: str, round_: int, samples: Sequence[Sample], phi: np.ndarray) -> Path:
    """Write ``phi.html``, for its owner alone: t-SNE of N patients' ``phi`` (N, d) by age and sex (FedTAR, Fig. 3)."""
    ages, sexes = [age_of(sample) for sample in samples], [sex_of(sample) for sample in samples]
    plane, figures = tsne(phi).tolist(), []
    for title, kinds, labels in (
        ("By age, years", [name for *_, name in AGES], ages),
        ("By sex", ["women", "men"], sexes),
    ):
        colours = {**dict(zip(kinds, range(6), strict=False)), "unknown": 6}
        points = [(x, y, label) for (x, y), label in zip(plane, labels, strict=True)]
        groups = {kind: (i, [point for point in points if point[2] == kind]) for kind, i in colours.items()}
        figures.append(scatter(title, groups).figure())
    text = render("phi_page.html", site=site, round=round_, n=len(phi), figures=figures, kind="")
    return write_text(folder / "phi.html", text, PRIVATE)
