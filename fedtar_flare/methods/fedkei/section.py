"""FedKEI's sections of the run page."""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from statistics import fmean

from fedtar_flare.methods.fedkei.events import Learnt, Mixed, SiteTask
from fedtar_flare.metrics.classification import epochs_to, lca
from fedtar_flare.reporting.format import NOTHING, duration, number, size
from fedtar_flare.reporting.plots import Chart, Guide, Series, scatter
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, charts, table

SMALL = (300, 190)
GUESS = [Guide(0.5, "a guess")]
READINGS = ("AUC at start", "AUC tuned", "LCA")
RAND = ("Rand at start", "Rand tuned", "Rand LCA")


def tasks(run: Run) -> Section | None:
    """AUC at the start and after tuning, and LCA, of each task and site, with those from the common start."""
    results = list(_learnt(run))
    if not results:
        return None
    with_rand = any(result.rand_auc for *_, result in results)
    head = ["task", "site", "disease", "test images", *READINGS]
    head += [*([*RAND, "epochs to Rand's"] if with_rand else []), "membership"]
    rows = []
    for step, site, result in results:
        row = [str(step), site, _words(result.task), str(result.n) if result.n else NOTHING, *_readings(result.auc)]
        if with_rand:
            reached = epochs_to(result.auc, result.rand_auc[-1]) if result.rand_auc else NOTHING
            row += [*_readings(result.rand_auc), "not reached" if reached is None else str(reached)]
        rows.append([*row, number(result.membership)])
    settings = run.start.settings.get("fedkei", {})
    lead = (
        f"Plan '{settings.get('plan')}', order '{settings.get('order')}'. The new disease of each task against all "
        "before it: AUC of test images at the start (before the first epoch) and tuned (after the last), and LCA, its "
        "mean over the epochs; blank where a class has too few test patients. Membership is the AUC of guessing by the "
        "module's certainty of an image's label whether it was tuned on it (0.5: a guess): the server has every "
        "module, other hospitals that of a centre of one site, and better attacks find more."
    )
    if with_rand:
        lead += (
            " Rand is the same tuning from the common start; 'epochs to Rand's': until the AUC is as high as Rand's is "
            "when tuned."
        )
    if "'small'" in str(run.start.model.get("base_model", "")):
        lead += " The shipped encoder has seen six of the phantoms' findings in its warm start, as reports."
    return Section("tasks", "Diseases", lead, table(head, rows, left={1, 2}), _lines(results))


def _lines(results: Sequence[tuple[int, str, SiteTask]]) -> tuple[tuple[str, str], ...]:
    """Means over sites and tasks after the first (which no start can inform), for tiles and closing box."""
    later = [result for step, _, result in results if step > 1 and result.auc] or [result for *_, result in results]
    readings: dict[str, Callable[[list[float]], float | None]] = {
        "AUC at the start": itemgetter(0),
        "AUC after tuning": itemgetter(-1),
        "LCA": lca,
    }
    lines = []
    for label, reading in readings.items():
        means = []
        for curves in ([result.auc for result in later], [result.rand_auc for result in later]):
            values = [value for curve in curves if curve and (value := reading(curve)) is not None]
            means.append(f"{fmean(values):.3f}" if values else "")
        if means[0]:
            lines.append((label, means[0] + (f", Rand {means[1]}" if means[1] else "") + ", tasks after the first"))
    return tuple(lines)


def curves(run: Run) -> Section | None:
    """Per task a chart of AUC over epochs: the sites' mean with its range, and that from the common start."""
    figures = []
    everything = [auc for *_, result in _learnt(run) for auc in (*result.auc, *result.rand_auc)]
    scale = (min([0.5, *everything]) - 0.05, 1.0)
    for event in run.events(Learnt):
        scored = [result for _, result in sorted(event.sites.items()) if result.auc]
        if not scored:
            continue
        lines = [_mean("mean of sites", [result.auc for result in scored], "ink")]
        if rand := [result.rand_auc for result in scored if result.rand_auc]:
            lines.append(_mean("Rand, mean", rand, "site", 6))
        title = f"Task {event.round}: {', '.join(sorted({_words(result.task) for result in scored}))}"
        figures.append(Chart(title, lines, x_label="epoch", y_label="AUC", y_range=scale, guides=GUESS, size=SMALL))
    lead = "AUC of test images over the epochs of tuning; epoch 0 is the start. A band is the range of the sites."
    return Section("curves", "Learning curves", lead, charts(figures, "small")) if figures else None


def _mean(name: str, curves: Sequence[Sequence[float]], palette: str, index: int = 0) -> Series:
    points, band = [], []
    for e in range(min(map(len, curves))):
        values = [curve[e] for curve in curves]
        points.append((e, fmean(values), f"{name}, epoch {e}: {number(fmean(values))}"))
        band.append((e, min(values), max(values)))
    return Series(name, points, palette, index, band if len(curves) > 1 else ())  # type: ignore[arg-type]


def clusters(run: Run) -> Section | None:
    """Which modules made which centre of a task, with their weights."""
    rows = []
    diseases = _diseases(run)
    for event in run.events(Mixed):
        for cluster in event.clusters:
            members = []
            for m in sorted(cluster["members"], key=itemgetter("task", "site")):
                weight = f"{m['beta']:.3f}"
                if abs(m["beta"] - m["beta0"]) >= 5e-4:
                    weight = f"{m['beta0']:.3f} → {weight}"
                disease = diseases.get((m["task"], m["site"]), f"task {m['task']}")
                members.append(f"{m['site']}, {disease}: {weight}")
            whose = f" for {cluster['for']}" if cluster.get("for") else ""
            moved = NOTHING if cluster.get("distance") is None else f"{cluster['distance']:.2g}"
            kind, centre = f"{cluster['kind']}{whose}", str(cluster["cluster"] + 1)
            rows.append((str(event.round), kind, centre, "; ".join(members), moved))
    if not rows:
        return None
    lead = (
        "Before each task the server clusters all earlier modules, adapters and heads apart: a site's module of a "
        "disease, with its weight in the centre (before → after the outer step, which moved all weights so far). A "
        "centre of one site is that site's module, which all others get."
    )
    head = ("before task", "of", "centre", "members and weights", "moved")
    return Section("clusters", "Clusters", lead, table(head, rows, left={1, 3}), optimisation=True)


def plane(run: Run) -> Section | None:
    """t-SNE of the modules before the last task, by cluster (FedKEI, Fig. 8)."""
    events = [event for event in run.events(Mixed) if event.plane]
    if not events:
        return None
    diseases = _diseases(run)
    drawn = []
    for kind, modules in events[-1].plane.items():
        centres: dict[str, tuple[int, list[tuple[float, float, str]]]] = {}
        for module in sorted(modules, key=itemgetter("cluster")):
            tip = f"{module['site']}, {diseases.get((module['task'], module['site']), module['task'])}"
            _, points = centres.setdefault(f"centre {module['cluster'] + 1}", (module["cluster"], []))
            points.append((module["x"], module["y"], tip))
        drawn.append(scatter(f"Modules: {kind}s", centres))
    lead = f"All modules in the pool before task {events[-1].round}, in the colour of their centres. Near points have "
    lead += "near weights; distances between groups mean nothing."
    return Section("places", "Modules in the plane", lead, charts(drawn, ""), optimisation=True)


def cost(run: Run) -> Section | None:
    """Seconds and bytes of the start and of tuning, task by task."""
    mixed = {event.round: event for event in run.events(Mixed)}
    if not mixed:
        return None
    learnt = {event.round: event.sites.values() for event in run.events(Learnt)}
    rows = []
    for step, event in sorted(mixed.items()):
        sites = list(learnt.get(step, ()))
        exchanges = [event for event in run.steps if event.round == step]
        row = [str(step), duration(event.clustering_seconds)]
        row.append(duration(event.probe_seconds) if event.probed else NOTHING)
        for phase in ("alpha", "tuning", "evaluation"):
            seconds = [result.seconds[phase] for result in sites if phase in result.seconds]
            row.append(duration(max(seconds, default=None)))
        row += [size(sum(event.bytes_down for event in exchanges)), size(sum(event.bytes_up for event in exchanges))]
        for losses in ([result.mixture_loss for result in sites], [result.start_loss for result in sites]):
            known = [loss for loss in losses if loss is not None]
            row.append(number(fmean(known)) if known else NOTHING)
        rows.append(row)
    phases = ("clustering", "PROBE", "alpha", "tuning", "scoring")
    head = ("task", *phases, "to sites", "from sites", "mixture's loss", "common start's")
    lead = (
        "What an informed start costs besides tuning, at the slowest site, and bytes to and from all sites. The losses "
        "are means over the sites' validation images before any tuning."
    )
    return Section("cost", "What a start costs", lead, table(head, rows), optimisation=True)


SECTIONS = (tasks, curves, clusters, plane, cost)


def _learnt(run: Run) -> Iterator[tuple[int, str, SiteTask]]:
    for event in run.events(Learnt):
        for site, result in sorted(event.sites.items()):
            yield event.round, site, result


def _diseases(run: Run) -> dict[tuple[int, str], str]:
    """Disease of each module, by task and site."""
    return {(step, site): _words(result.task) for step, site, result in _learnt(run)}


def _words(disease: str) -> str:
    return disease.replace("_", " ")


def _readings(auc: Sequence[float | None]) -> tuple[str, str, str]:
    """What :data:`READINGS` names, of the AUC at epoch 0..E; blank where it is not known."""
    known = [value for value in auc if value is not None]
    return (number(known[0]), number(known[-1]), number(lca(known))) if known else (NOTHING,) * 3
