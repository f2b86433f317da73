"""FedMRG's sections of the run page: members and unseen hospitals, the two halves of training, the bank."""

from collections.abc import Collection, Iterable, Mapping
from statistics import fmean

from fedtar_flare.methods.fedmrg.events import Bank, LossParts, Outside
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import SiteScores
from fedtar_flare.reporting.format import NOTHING, number, score
from fedtar_flare.reporting.plots import Chart, Series
from fedtar_flare.reporting.run import Run
from fedtar_flare.reporting.section import Section, charts, round_axis, table

SHOWN = ("bleu_4", "rouge_l", "cider", "token_loss", "finding_f1_known", "finding_f1_new", "ctrate_rules_f1")
"""Scores by which generic and personal model are compared, where the run has them."""

PARTS = {
    "language_generic": "language, generic",
    "language_specialised": "language, specialised",
    "distillation_generic": "KD to generic",
    "distillation_specialised": "KD to specialised",
    "diagnosis": "diagnosis",
    "contrast": "contrast",
}
"""Parts of the training loss, as they are named for people."""


def members(run: Run) -> Section | None:
    """Scores of the generic and of the personal model at the members, and of the generic one at unseen hospitals."""
    if run.shown is None:
        return None
    unseen = {site for event in run.events(Outside) for site in event.sites}
    before = run.warm_start.sites if run.warm_start is not None else {}
    groups = [
        ("before training", "members, before training", before.keys() - unseen, before),
        ("both adapters", "members, both adapters", run.shown.sites.keys() - unseen, run.shown.sites),
        ("generic alone", "members, generic adapter alone", run.shown.generic.keys() - unseen, run.shown.generic),
        ("unseen", "unseen hospitals", run.shown.sites.keys() & unseen, run.shown.sites),
    ]
    shown = [(short, long, len(sites), _means(of, sites)) for short, long, sites, of in groups if sites]
    names = [name for name in SHOWN if any(name in means for *_, means in shown)]
    rows = [(f"{short} ({n})", *(score(name, means.get(name)) for name in names)) for short, _, n, means in shown]
    lead = (
        f"Means over hospitals (how many) before training and after round {run.shown.round}. The generic adapter "
        "travels; the specialised one stays at its hospital and writes along there (Eq. 6). An unseen hospital never "
        "trains: all of its patients are scored, with the generic adapter."
    )
    labels = [SCORES[name].label for name in names]
    texts = (", ".join(map("{} {}".format, labels, row[1:])) for row in rows)
    lines = tuple((long, text) for (_, long, *_), text in zip(shown, texts, strict=True))
    content = table(("", *labels), rows)
    return Section("fedmrg", "Generic and personal", lead, content, lines)


def halves(run: Run) -> Section | None:
    """Parts of the training loss over rounds, mean of the sites, and of the last round site by site."""
    events = run.events(LossParts)
    shown = [part for part in PARTS if any(part in parts for event in events for parts in event.sites.values())]
    if not shown:
        return None
    series = []
    for i, part in enumerate(shown):
        means = [(event.round, _mean(parts.get(part) for parts in event.sites.values())) for event in events]
        points = [(r, value, f"{PARTS[part]}, round {r}: {number(value)}") for r, value in means]
        series.append(Series(PARTS[part], points, "site", i))
    title = "Parts of the training loss, mean of sites"
    figure = Chart(title, series, x_label="round", y_label="loss", x_range=round_axis(run))
    last = events[-1]
    rows = [(site, *(number(parts.get(part)) for part in shown)) for site, parts in sorted(last.sites.items())]
    below_0 = "The contrast leaves its positive out of the sum, so that it may fall below 0. " * ("contrast" in shown)
    lead = (
        "Each local update has two halves: the generic adapter learns from reports and from the specialised one, then "
        f"the other way round. Language is the mean token loss, KD the distillation (Eq. 4 and 5). {below_0}The table "
        f"is of round {last.round}."
    )
    content = charts([figure]) + table(("", *(PARTS[part] for part in shown)), rows)
    return Section("halves", "Two halves", lead, content, optimisation=True)


def bank(run: Run) -> Section | None:
    """The feature bank over rounds, and how well each site's rows give away who is in them."""
    rows, aucs, sent = [], [], 0.0
    for event in run.events(Bank):
        for site, numbers in sorted(event.sites.items()):
            counts = [numbers.get(name) for name in ("sent", "received", "patients_a_row")]
            shown = [NOTHING if count is None else f"{count:g}" for count in counts]
            rows.append((str(event.round), str(event.rows), site, *shown, number(numbers.get("membership_auc"))))
            aucs += [numbers["membership_auc"]] if "membership_auc" in numbers else []
            sent += numbers.get("sent", 0.0)
    if not sent:
        return None
    lead = (
        "Each member sends rows of image features, which the others contrast their images with. They are personal "
        "data: who has a patient's image and the encoder can compare it with them. Membership is the AUC of that guess "
        "by the largest cosine to any of a site's rows (1: who is in the rows is certain; 0.5: a guess)."
    )
    head = ("round", "rows sent down", "site", "sent", "received", "patients a row", "membership")
    lines = (("feature bank", f"membership by cosine, AUC {min(aucs):.3f} to {max(aucs):.3f}"),) if aucs else ()
    return Section("bank", "Feature bank", lead, table(head, rows, left={2}), lines, optimisation=True)


SECTIONS = (members, halves, bank)


def _means(scores: Mapping[str, SiteScores], sites: Collection[str]) -> dict[str, float]:
    means = {name: _mean(scores[site].all.get(name) for site in sites) for name in SHOWN}
    return {name: value for name, value in means.items() if value is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
