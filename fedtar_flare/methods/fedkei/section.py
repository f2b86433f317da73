"""FedKEI's sections of the run page, and a site's own page of its modules."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from fedtar_flare.core.files import PRIVATE, write_text
from fedtar_flare.methods.fedkei.events import Learnt, Mixed, SiteTask, Stream
from fedtar_flare.methods.fedkei.mixing import KINDS
from fedtar_flare.metrics.classification import best_epoch, epochs_to, lca
from fedtar_flare.reporting import tsne
from fedtar_flare.reporting.format import NOTHING, duration, number, size
from fedtar_flare.reporting.plots import Chart, Guide, Series
from fedtar_flare.reporting.render import render
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, charts, table
from fedtar_flare.site.state import SiteState

SMALL = (300, 190)
READINGS = ("AUC at start", "AUC tuned", "LCA")
RAND = ("Rand at start", "Rand tuned", "Rand LCA")
_KNOWN = (
    "Of the phantoms' findings the shipped encoder has seen six in its warm start, as reports: where the images are "
    "phantoms, those are new to the head and the adapter, not to the encoder."
)


def tasks(run: Run) -> Section | None:
    """AUC at the start and after tuning, and LCA, of each task and site, with those from the common start."""
    results = list(_learnt(run))
    if not results:
        return None
    with_rand, fell_back = (any(getattr(result, name) for *_, result in results) for name in ("rand_auc", "fell_back"))
    head = ["task", "site", "disease", "test images", *READINGS]
    head += [*RAND, "epochs to Rand's"] if with_rand else ["best epoch"]
    head += ["fell back"] if fell_back else []
    rows = []
    for step, site, result in results:
        row = [str(step), site, _words(result.task), str(result.n) if result.n else NOTHING, *_readings(result.auc)]
        if with_rand:
            row += [*_readings(result.rand_auc), _reached(result)]
        else:
            row.append(str(best_epoch(result.auc)) if result.auc else NOTHING)
        rows.append(row + (["yes" if result.fell_back else ""] if fell_back else []))
    streams = run.events(Stream)
    title = f"Plan '{streams[-1].plan}', order '{streams[-1].order}'" if streams else "Tasks"
    lead = (
        f"{title}. The new disease of each task against all before it: AUC of test images at the start (before the "
        "first epoch) and tuned (after the last), and LCA, its mean over the epochs."
    )
    if with_rand:
        lead += (
            " Rand is the same tuning from the common start; 'epochs to Rand's' says after how many epochs the AUC is "
            "as high as Rand's is when tuned (and which epoch was best)."
        )
    if fell_back:
        lead += " 'Fell back': the safeguard took the common start."
    lead += " Cells are blank where a class has too few test patients."
    if "'small'" in str(run.start.model.get("base_model", "")):
        lead += f" {_KNOWN}"
    return Section("tasks", "Diseases", lead, table(head, rows, left={1, 2}), _lines(run))


def curves(run: Run) -> Section | None:
    """Per task a chart of AUC over epochs: the sites, their mean, and the mean from the common start with its range."""
    figures = []
    guess = [Guide(0.5, "a guess")]
    everything = [auc for *_, result in _learnt(run) for auc in (*result.auc, *result.rand_auc)]
    lowest = min([0.5, *everything]) - 0.05
    for event in run.events(Learnt):
        scored = {site: result for site, result in sorted(event.sites.items()) if result.auc}
        if not scored:
            continue
        diseases = {result.task for result in scored.values()}
        lines = [
            Series(
                site if len(diseases) == 1 else f"{site}: {_words(result.task)}",
                [(e, auc, f"{site}, {result.task}, epoch {e}: {number(auc)}") for e, auc in enumerate(result.auc)],
                "site",
                i,
            )
            for i, (site, result) in enumerate(scored.items())
        ]
        lines.append(_mean("mean of sites", [result.auc for result in scored.values()], "ink"))
        if rand := [result.rand_auc for result in scored.values() if result.rand_auc]:
            lines.append(_mean("Rand, mean", rand, "site", 6))
        title = f"Task {event.round}" + (f": {_words(*diseases)}" if len(diseases) == 1 else "")
        scale = (lowest, 1.0)
        figures.append(Chart(title, lines, x_label="epoch", y_label="AUC", y_range=scale, guides=guess, size=SMALL))
    lead = (
        "AUC of test images over the epochs of tuning; epoch 0 is the start itself. A band is the range of the sites "
        "around their mean. Few test images make steps. All charts have one scale."
    )
    return Section("curves", "Learning curves", lead, charts(figures, "small")) if figures else None


def clusters(run: Run) -> Section | None:
    """Which modules made which centre of a task, with their weights."""
    rows = []
    learnt = {(step, site): cluster.task for step, site, cluster in _learnt(run)}
    for event in run.events(Mixed):
        for cluster in event.clusters:
            members = sorted(cluster["members"], key=lambda m: (m["task"], m["site"]))
            text = "; ".join(_member(m, learnt) for m in members)
            whose = f" for {cluster['for']}" if cluster.get("for") else ""
            moved = NOTHING if cluster.get("distance") is None else f"{cluster['distance']:.2g}"
            rows.append((str(event.round), f"{cluster['kind']}{whose}", str(cluster["cluster"] + 1), text, moved))
    if not rows:
        return None
    lead = (
        "Before each task the server clusters all modules of the tasks before it, adapters and heads apart. A member "
        "is a site's module of a disease, with its weight in the centre (before → after the outer step, where that "
        "moved it); 'moved' is how far the step took all weights of the centre from the mean (Euclidean). A centre of "
        "one site is that site's module, which all others get."
    )
    head = ("before task", "of", "centre", "members and weights", "moved")
    return Section("clusters", "Clusters", lead, table(head, rows, left={1, 3}), optimisation=True)


def places(run: Run) -> Section | None:
    """t-SNE of the modules before the last task, by cluster (FedKEI, Fig. 8)."""
    events = [event for event in run.events(Mixed) if event.plane]
    if not events:
        return None
    learnt = {(step, site): _words(module.task) for step, site, module in _learnt(run)}
    drawn = []
    for kind, modules in events[-1].plane.items():
        of: dict[str, tuple[int, list[tuple[float, float, str]]]] = {}
        for module in sorted(modules, key=itemgetter("cluster")):
            tip = f"{module['site']}, {learnt.get((module['task'], module['site']), module['task'])}"
            _, points = of.setdefault(f"centre {module['cluster'] + 1}", (module["cluster"], []))
            points.append((module["x"], module["y"], tip))
        drawn.append(tsne.scatter(f"Modules: {kind}s", of))
    lead = (
        f"All modules in the pool before task {events[-1].round}, a point each, in the colour of its centre. Near "
        "points are modules with near weights; distances between groups and the axes themselves mean nothing."
    )
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
        moved = [event for event in run.steps if event.round == step]
        row = [str(step), duration(event.clustering_seconds)]
        row.append(duration(event.probe_seconds) if event.probed else NOTHING)
        for phase in ("alpha", "tuning", "evaluation"):
            row.append(
                duration(max((result.seconds[phase] for result in sites if phase in result.seconds), default=None))
            )
        row += [size(sum(event.bytes_down for event in moved)), size(sum(event.bytes_up for event in moved))]
        row += [
            str(sum(result.fell_back for result in sites)),
            *(_losses(sites, n) for n in ("mixture_loss", "start_loss")),
        ]
        rows.append(row)
    phases = ("clustering", "PROBE", "alpha", "tuning", "scoring")
    head = ("task", *phases, "to sites", "from sites", "fell back", "mixture's loss", "common start's")
    lead = (
        "What an informed start costs besides tuning: clustering at the server, PROBE (until the last site's answer, "
        "with the start of its process), the inner epoch for alpha, each at the slowest site; bytes to and from all "
        "sites, and how many fell back to the common start. The losses are means over the sites' validation images "
        "before any tuning, of the mixture and of the common start."
    )
    return Section("cost", "What a start costs", lead, table(head, rows), optimisation=True)


def membership(run: Run) -> Section | None:
    """How well the modules in the pool give away whose images they were tuned on."""
    results = [(step, site, result) for step, site, result in _learnt(run) if result.membership is not None]
    if not results:
        return None
    lines = []
    for i, site in enumerate(dict.fromkeys(sorted(site for _, site, _ in results))):
        points: list[tuple[float, float | None, str]] = [
            (step, result.membership, f"{site}, task {step}, {result.task}: {number(result.membership)}")
            for step, own, result in results
            if own == site
        ]
        lines.append(Series(site, points, "site", i))
    chart = Chart(
        "Membership by the module", lines, x_label="task", y_label="AUC", guides=[Guide(0.5, "a guess")], size=SMALL
    )
    lead = (
        "Whoever has a hospital's module and an image with its label can ask whether the module was tuned on it: the "
        "surer the module is of the label, the likelier. Each site tried that on its own training and test images; the "
        "AUC of the attempt is 0.5 for a guess and 1 where every training image is known. The server has every module, "
        "and other hospitals have the module of a centre of one site. It is one simple attack: a stronger one, with "
        "models trained on similar images, finds more."
    )
    return Section("membership", "What a module tells of its images", lead, charts([chart], "small"))


SECTIONS = (tasks, curves, clusters, places, cost, membership)


def write_modules_page(state: SiteState, site: str) -> Path:
    """Write ``modules.html`` into the site's state of a run: a line for each module, with alpha; returns its path."""
    modules = {name: state.read(name)[1] for name in state.names("module-")}
    fell_back = any(about["fell_back"] for about in modules.values())
    head = ["task", "disease", *READINGS, *RAND, "alpha of adapters", "alpha of heads"]
    rows = []
    for name, about in modules.items():
        alphas = (about["alpha"].get(kind, ()) for kind in KINDS)
        row = [str(int(name.removeprefix("module-"))), about["task"], *_readings(about["auc"])]
        row += _readings(about["rand_auc"] or ())
        row += [", ".join(f"{v:.3f}" for v in weights) or NOTHING for weights in alphas]
        rows.append(row + (["yes" if about["fell_back"] else ""] if fell_back else []))
    content = table([*head, *(["fell back"] if fell_back else [])], rows, left={1, 8, 9})
    page = render("modules_page.html", site=site, content=content)
    return write_text(state.folder / "modules.html", page, PRIVATE)


def _learnt(run: Run) -> Iterator[tuple[int, str, SiteTask]]:
    for event in run.events(Learnt):
        for site, result in sorted(event.sites.items()):
            yield event.round, site, result


def _lines(run: Run) -> tuple[tuple[str, str], ...]:
    """Means over sites and tasks after the first (which no start can inform), for tiles and closing box."""
    learnt = list(_learnt(run))
    later = [result for step, _, result in learnt if step > 1 and result.auc] or [result for *_, result in learnt]
    shown = []
    readings: dict[str, Callable[[list[float]], float | None]] = {
        "AUC at the start": lambda curve: curve[0],
        "AUC after tuning": lambda curve: curve[-1],
        "LCA": lca,
    }
    for label, read in readings.items():
        own, rand = (
            [value for curve in curves if curve and (value := read(curve)) is not None]
            for curves in ([result.auc for result in later], [result.rand_auc for result in later])
        )
        if own:
            with_rand = f", Rand {fmean(rand):.3f}" if rand else ""
            shown.append((label, f"{fmean(own):.3f}{with_rand}, tasks after the first"))
    return tuple(shown)


def _words(disease: str) -> str:
    return disease.replace("_", " ")


def _readings(auc: Sequence[float | None]) -> tuple[str, str, str]:
    """What :data:`READINGS` names, of the AUC at epoch 0..E; blank where it is not known."""
    known = [value for value in auc if value is not None]
    return (number(known[0]), number(known[-1]), number(lca(known))) if known else (NOTHING,) * 3


def _reached(result: SiteTask) -> str:
    """Epochs until Rand's final AUC, and in brackets the best epoch."""
    if not result.auc:
        return NOTHING
    reached = epochs_to(result.auc, result.rand_auc[-1]) if result.rand_auc else None
    return f"{'not reached' if reached is None else reached} (best {best_epoch(result.auc)})"


def _mean(name: str, curves: Sequence[Sequence[float]], palette: str, index: int = 0) -> Series:
    points, band = [], []
    for e in range(min(map(len, curves))):
        values = [curve[e] for curve in curves]
        points.append((e, fmean(values), f"{name}, epoch {e}: {number(fmean(values))}"))
        band.append((e, min(values), max(values)))
    return Series(name, points, palette, index, band if len(curves) > 1 else ())  # type: ignore[arg-type]


def _member(member: dict[str, Any], learnt: dict[tuple[int, str], str]) -> str:
    """A module by its disease, or by the task's number where the record does not tell it, and its weight."""
    disease = learnt.get((member["task"], member["site"]), f"task {member['task']}")
    before, after = member["beta0"], member["beta"]
    weight = f"{after:.3f}" if abs(after - before) < 5e-4 else f"{before:.3f} → {after:.3f}"
    return f"{member['site']}, {_words(disease)}: {weight}"


def _losses(sites: Iterable[SiteTask], name: str) -> str:
    known = [value for result in sites if (value := getattr(result, name)) is not None]
    return number(fmean(known)) if known else NOTHING
