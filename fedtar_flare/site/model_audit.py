"""Audit of a run's adapter: whether it shows who of this site was trained on, and repeats phrases of their reports.

Membership is tested as by somebody with the adapter, the warm start and a patient's studies: the score is the fall of
the reports' mean token loss from the one to the other, which takes out how hard each report is (the loss difference of
Carlini et al. 2022, *Membership inference attacks from first principles*). An AUC of 0.5 is chance. Where a
run changes the style of reports, the fall says most about the start; the loss alone is then the better score, and both
are given. They are lower bounds: an attacker with shadow models may do better.

With shadow runs it is that paper's offline attack (LiRA): each patient's loss is held against those of models that did
not see the patient. The shadows are of this site alone, not of whole federations.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from fedtar_flare import registry
from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.core.files import PRIVATE, write_json
from fedtar_flare.core.settings import build
from fedtar_flare.data.cells import Split
from fedtar_flare.data.cohort import Cohort, Sample
from fedtar_flare.imaging.batch import change_of
from fedtar_flare.learning.canaries import BITS, canaries, exposure
from fedtar_flare.learning.config import DataConfig, LoRAConfig, TrainingConfig
from fedtar_flare.learning.drafting import Drafter, base_config
from fedtar_flare.learning.labels import labeler_of
from fedtar_flare.learning.site_model import EVALUATION_BATCH, SiteModel
from fedtar_flare.learning.training import parts
from fedtar_flare.metrics.language import clean
from fedtar_flare.metrics.significance import wilson
from fedtar_flare.models.adapters.peft_file import adapter_hashes, read_adapter_info
from fedtar_flare.models.sources import hub_access
from fedtar_flare.reporting.model_audit import PARTS, rounded
from fedtar_flare.site.cohort import prepare_site
from fedtar_flare.site.context import Site
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import SiteState

AUDIT = "model-audit.json"
"""What an audit leaves in the site's state of the run."""
WORDS = 8
"""Length of the phrases that are counted."""
RARE = 0.1
"""A finding is rare that at most this share of the site's patients has."""
FEWEST = 10
"""Training, and held-out, patients that shadow runs need; one held-out patient in so many may be a false alarm."""

Texts = Sequence[tuple[str, str]]
"""Patient and text."""


def verbatim(drafts: Texts, reports: Texts, trained: AbstractSet[str]) -> dict[str, float]:
    """Search drafts for phrases that are in the ``reports`` of one patient only.

    Shares of all phrases, and the longest one in words: of the draft's own patient, of ``other`` patients who were
    trained on, and of other ``unseen`` ones, whose phrases come by chance.
    """
    kinds = ("own", "other", "unseen")
    shares: dict[str, float] = {name: 0 for kind in kinds for name in (kind, f"longest_{kind}")}
    drafted, written = ([(patient, clean(text).split()) for patient, text in texts] for texts in (drafts, reports))
    words, seen = WORDS, True
    while seen:
        owners: dict[tuple[str, ...], str | None] = {}  # None: several patients
        for patient, phrase in _phrases(written, words):
            owners[phrase] = patient if owners.get(phrase, patient) == patient else None
        count, seen = Counter[str](), False
        for patient, phrase in _phrases(drafted, words):
            owner, seen = owners.get(phrase), seen or phrase in owners
            found = "other" if owner in trained else "unseen"
            count["nobody's" if owner is None else "own" if owner == patient else found] += 1
        for kind in kinds:
            if words == WORDS and count:
                shares[kind] = count[kind] / count.total()
            if count[kind]:
                shares[f"longest_{kind}"] = words
        words += 1
    return shares


def membership_auc(scores: Mapping[str, float], members: AbstractSet[str]) -> tuple[float, float] | tuple[None, None]:
    """AUC of recognising ``members`` by a higher score, and its error (Hanley and McNeil 1982), or None."""
    mine = np.array([score for patient, score in scores.items() if patient in members])
    others = np.array([score for patient, score in scores.items() if patient not in members])
    if not mine.size or not others.size:
        return None, None
    above = np.subtract.outer(mine, others)
    a = float(np.mean((above > 0) + (above == 0) / 2))
    spread = a * (1 - a) + (mine.size - 1) * (a / (2 - a) - a * a) + (others.size - 1) * (2 * a * a / (1 + a) - a * a)
    return a, math.sqrt(max(0.0, spread) / (mine.size * others.size))


def likelihood_scores(losses: Mapping[str, float], outside: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How far each patient's loss is below the mean of models ``outside``: in the order of likelihoods."""
    return {
        patient: fmean(shadow[patient] for shadow in outside if patient in shadow) - loss
        for patient, loss in losses.items()
    }


def detection_rate(scores: Mapping[str, float], members: AbstractSet[str]) -> tuple[float, tuple[float, float]]:
    """Share of ``members`` above all but one in :data:`FEWEST` of the others, and its 95 % interval (Wilson 1927)."""
    others = sorted((score for patient, score in scores.items() if patient not in members), reverse=True)
    above = [score > others[len(others) // FEWEST] for patient, score in scores.items() if patient in members]
    return fmean(above), wilson(sum(above), len(above))


def audit_model(
    adapter: Path,
    site: Site,
    config: SiteConfig,
    model: Mapping[str, Any],
    say: Callable[[str], object],
    shadows: int = 0,
    shadow: Callable[..., SiteModel] | None = None,
) -> dict[str, Any]:
    """Audit an adapter on the patients of a site that took part in its run; under ``rounded`` is what may leave."""
    if shadows and shadows < 2:
        raise ConfigError(f"--shadows {shadows}: 2 or more, so that each patient was not seen by at least one")
    info = read_adapter_info(adapter)
    state = SiteState(site.state_root(config.state_dir), str(info["run_id"]), site.name)
    about, base = state.about_run(), base_config(info, model)
    data = build(DataConfig, about["data"], str(state.folder))
    of_run = {"time_steps": about["time_steps"], "seed": about["seed"], "workspace": site.workspace}
    cohort, _ = prepare_site(config, site.name, model=base, data=data, say=say, **of_run)
    least = max(data.min_cell, config.policy.min_patients)
    groups = {"training": cohort.samples("train", least=least)}
    groups["held_out"] = [*cohort.samples("validation"), *cohort.samples("test")]
    if not all(groups.values()):
        raise DataError(f"site {site.name} has no training or no held-out patient of run {info['run_id']}")

    folder = state.folder if registry.method(info.get("method", registry.DEFAULT)).saved_learner else None
    trained = Drafter(adapter, state=folder, key=cohort.key, model=model, device=config.device).site_model
    plain: dict[str, Any] = {"lora": LoRAConfig(), "training": TrainingConfig(), "restored": lambda base: base}
    plain |= {"device": str(trained.device), "precision": trained.precision}
    with hub_access(allowed=False):
        start = SiteModel(model=base, cohort=cohort, seed=0, **plain)
    for site_model in (start, trained):
        site_model.cohort, site_model.transforms = cohort, data.transforms
        changes = data.image_changes
        site_model.image_change = change_of(site.name, about["seed"], changes) if changes else None
    local = getattr(trained, "local", None) is not None  # whether the site has shared factors of its own
    # by part: the model, with its personal part, with the shared factors as the site has them; whether it writes
    chosen = [(start, False, False, True), (trained, False, False, True)]
    chosen += [(trained, True, False, not local)] * trained.has_personal_part + [(trained, True, True, True)] * local

    ids = {name: {sample.visit.patient_id for sample in group} for name, group in groups.items()}
    samples = [sample for group in groups.values() for sample in group]
    reports = [(sample.visit.patient_id, sample.visit.report) for sample in samples]
    rare = _with_rare_finding(samples)
    planted = canaries(cohort, str(info["run_id"]), about.get("canaries", 0), trained.tokenizer, state.folder)
    outside: list[dict[str, dict[str, float]]] = []
    if shadows and shadow is not None:
        if min(map(len, ids.values())) < FEWEST:
            counts_ = " and ".join(f"{len(group)} {name.replace('_', '-')}" for name, group in ids.items())
            raise DataError(f"--shadows: site {site.name} has {counts_} patients; it takes {FEWEST} of each")
        for half in _halves(sorted(set().union(*ids.values())), shadows, f"{about['seed']} {info['run_id']}"):
            say(f"shadow run {len(outside) + 1} of {shadows}")
            shadow_cohort = training_on(cohort, half)
            shadow_run = shadow(shadow_cohort, about, int(info["round"]), site=site, config=config, model=model)
            unseen, losses = [sample for sample in samples if sample.visit.patient_id not in half], {}
            for name, (_, personal, shadow_run.writes, _) in zip(PARTS[1:], chosen[1:], strict=False):
                losses[name], _ = _losses_and_drafts(shadow_run, unseen, personal, False)
            outside.append(losses)
    reference: dict[str, float] = {}
    results: dict[str, Any] = {}
    for name, (part, personal, with_local, writes) in zip(PARTS, chosen, strict=False):
        say(f"auditing: {name}")
        part.writes = with_local
        of_groups = {g: _losses_and_drafts(part, of_group, personal, writes) for g, of_group in groups.items()}
        loss = {patient: value for losses_, _ in of_groups.values() for patient, value in losses_.items()}
        score = {patient: reference.get(patient, 0.0) - value for patient, value in loss.items()}
        reference = reference or loss
        auc, error = membership_auc(score, ids["training"])
        rare_auc, _ = membership_auc({patient: -loss[patient] for patient in rare}, ids["training"])
        loss_auc, loss_error = membership_auc({patient: -value for patient, value in loss.items()}, ids["training"])
        result: dict[str, Any] = {
            "membership_auc": auc,
            "standard_error": error,
            "loss_auc": loss_auc,
            "loss_error": loss_error,
            "rare_auc": rare_auc,
        }
        if writes:
            result |= {group: verbatim(texts, reports, ids["training"]) for group, (_, texts) in of_groups.items()}
        if outside and name != PARTS[0]:
            scores = likelihood_scores(loss, [losses[name] for losses in outside])
            result["shadow_auc"], result["shadow_error"] = membership_auc(scores, ids["training"])
            result |= zip(("shadow_found", "shadow_interval"), detection_rate(scores, ids["training"]), strict=True)
        if planted:
            bits = [exposure(part, canary, personal) for canary in planted]
            result |= {"exposures": bits, "exposure": fmean(bits) / BITS}
        if planted and writes:
            _, texts = _losses_and_drafts(part, planted, personal, writes)
            texts += (pair for _, pairs in of_groups.values() for pair in pairs)
            drafts = "\n".join(clean(text) for _, text in texts)
            result["written"] = sum(clean(canary.visit.report) in drafts for canary in planted)
        results[name] = result
    about = {"site": site.name, "run_id": str(info["run_id"]), "round": int(info["round"])}
    counts = {name: {"all": len(group), "rare": len(group & rare)} for name, group in ids.items()}
    bound = config.policy.max_membership_auc
    kinds = ("membership_auc", "loss_auc", *(["shadow_auc"] if outside else []))
    worst = max(results[name][by] for name in list(results)[1:] for by in kinds)
    details = about | {"patients": counts, "parts": results, "held": bound is not None and worst > bound}
    details |= {"least": least, "rounded": rounded(results, counts, least), "adapter": adapter_hashes(adapter)}
    write_json(state.folder / AUDIT, details, PRIVATE)
    return details


@torch.no_grad()
def _losses_and_drafts(
    model: SiteModel, samples: Sequence[Sample], personal: bool, writes: bool
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Mean losses by patient, and drafts."""
    losses: dict[str, list[float]] = {}
    texts: list[tuple[str, str]] = []
    for batch in parts(samples, EVALUATION_BATCH):
        images, ids = model.images(batch), [sample.visit.patient_id for sample in batch]
        for patient, loss in zip(ids, model.report_losses(batch, images, personal).tolist(), strict=True):
            losses.setdefault(patient, []).append(loss)
        if writes:
            texts += zip(ids, model.generate(batch, images, personal), strict=True)
    return {patient: fmean(values) for patient, values in losses.items()}, texts


def _halves(patients: Sequence[str], count: int, seed: str) -> Iterator[set[str]]:
    """Random halves, every other one the rest of the one before: of an even number, half lack each patient."""
    for i in range(count):
        order = random.Random(f"{seed} {i // 2}").sample(patients, len(patients))
        yield set(order[i % 2 :: 2])


def _with_rare_finding(samples: Sequence[Sample]) -> set[str]:
    reader, having = labeler_of([sample.visit for sample in samples]), dict[str, set[str]]()
    for visit in (sample.visit for sample in samples):
        for finding in reader.stated(visit.report) if visit.findings is None else visit.findings:
            having.setdefault(finding, set()).add(visit.patient_id)
    most = RARE * len({sample.visit.patient_id for sample in samples})
    return {patient for ids in having.values() if len(ids) <= most for patient in ids}


def _phrases(texts: Sequence[tuple[str, list[str]]], words: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each phrase of so many words, with its text's patient."""
    for patient, tokens in texts:
        yield from ((patient, tuple(tokens[i : i + words])) for i in range(len(tokens) - words + 1))


def training_on(cohort: Cohort, patients: Collection[str]) -> Cohort:
    """A copy of a cohort that trains on some patients and tests on all others."""
    split: dict[bool, Split] = {True: "train", False: "test"}
    return cohort.with_samples([replace(s, split=split[s.visit.patient_id in patients]) for s in cohort.samples(None)])
