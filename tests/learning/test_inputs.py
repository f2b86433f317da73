"""What the model reads: the visits before, shown and masked, and frozen stages, passed once with the same bits."""

import copy
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import learners
import numpy as np
import pytest
import torch
from batches import noise, rows
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.learning.inputs import FrozenStages, shown_kinds, writing_order
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import CVT_TARGETS, DECODER_TARGETS, preset

MODEL = preset("tiny", max_length=20)
BOTH = frozenset({"report", "image"})
LAST_STAGE = ("encoder.*.stages.2.*.dense", *DECODER_TARGETS)
SLICES = (4, 2, 3)


@pytest.fixture
def learner_of(cohort_of):
    def make(prior, prior_dropout=0.25):
        made = learners.learner_of(cohort_of(prior), model=MODEL, local_steps=1, seed=1)
        made.prior_dropout = prior_dropout
        with torch.no_grad():  # sharper than an untrained decoder, so that reports differ
            for parameter in made.model.get_base_model().decoder.parameters():
                parameter.mul_(4.0)
        return made

    return make


def course(days):
    """Samples of one patient's visits on these days."""
    made = []
    for day in sorted(days):
        visit = Visit("p", f"{day}", datetime(2020, 1, 1) + timedelta(days=day), f"{day}.png", f"report {day}", "ct")
        made.append(Sample(visit, made[-1].visit if made else None, None, 1, "train"))
    return made


@given(st.sets(st.integers(0, 999), max_size=6), st.sampled_from([(), ("report",), BOTH]), st.floats(0, 1))
def test_what_is_shown_and_masked(days, kinds, chance):
    samples = course(days)
    whole = shown_kinds(samples, kinds)
    assert whole == [frozenset(kinds if i else ()) for i in range(len(samples))]
    left = shown_kinds(samples, kinds, chance, "7/3")
    assert all(some <= every for some, every in zip(left, whole, strict=True))
    assert shown_kinds(samples[::-1], kinds, chance, "7/3") == left[::-1]
    assert not any(shown_kinds(samples, kinds, 1.0, "7/3"))


def test_the_masked_share_is_the_one_asked_for_and_each_kind_is_also_masked_by_itself():
    samples = course(range(2000))[1:]
    assert np.mean([not kinds for kinds in shown_kinds(samples, {"report"}, 0.3, "a")]) == pytest.approx(0.3, abs=0.03)
    left = shown_kinds(samples, BOTH, 0.3, "a")
    for kinds, share in ((BOTH, 0.7**3), (frozenset(), 0.3 + 0.7 * 0.09)):
        assert left.count(kinds) / len(left) == pytest.approx(share, abs=0.03)
    assert left != shown_kinds(samples, BOTH, 0.3, "b")


@given(st.sets(st.integers(0, 999), min_size=1, max_size=6), st.randoms())
def test_a_visit_is_written_after_the_visit_before(days, random):
    samples = course(days)
    random.shuffle(samples)
    written = set()
    for turn in writing_order(samples):
        assert all(samples[i].prior is None or samples[i].prior in written for i in turn)
        written |= {samples[i].visit for i in turn}
    assert len(written) == len(samples)


def test_first_visits_and_masked_ones_are_learned_from_as_without(learner_of):
    of = {"none": learner_of("none"), "shown": learner_of("report+image", 0.0), "masked": learner_of("report+image", 1)}
    first = {name: learner.train(1, 5).update for name, learner in of.items()}
    later = {name: learner.train(2, 5).update for name, learner in of.items()}
    for name, value in first["none"].items():
        assert torch.equal(first["shown"][name], value) and torch.equal(first["masked"][name], value)
        assert torch.equal(later["masked"][name], later["none"][name])
    assert not all(torch.equal(later["shown"][name], value) for name, value in later["none"].items())


def test_losses_and_drafts_of_a_batch_are_those_of_its_samples(learner_of):
    learner = learner_of("report+image")
    samples = learner.cohort.samples("train")[:5]
    assert {s.time_step for s in samples} == {1, 2, 3}, "first visits are among them"
    with torch.no_grad():
        together = learner.report_losses(samples, learner.images(samples))
        turned = learner.report_losses(samples[::-1], learner.images(samples[::-1]))
        each = torch.cat([learner.report_losses([s], learner.images([s])) for s in samples])
        drafts = learner.generate(samples, learner.images(samples))
        assert drafts == [learner.generate([s], learner.images([s]))[0] for s in samples]
    torch.testing.assert_close(together, turned.flip(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together, each, rtol=1e-4, atol=1e-5)


def with_junk(cohort):
    """The cohort with all reports replaced."""
    made = copy.copy(cohort)
    junk = lambda v: v and replace(v, report=f"junk {v.visit_id}")  # noqa: E731
    made._samples = [replace(s, visit=junk(s.visit), prior=junk(s.prior)) for s in cohort._samples]
    return made


def test_the_model_s_own_texts_and_never_a_reference_stand_for_generated(learner_of):
    texts = {}
    for prior in ("report", "generated"):
        learner = learner_of(prior)
        texts[prior] = learner.evaluate(1).texts
        learner.cohort = with_junk(learner.cohort)
        texts[f"{prior}, junk"] = learner.evaluate(1).texts
        assert len(texts[prior]) == len(learner.cohort.samples("test")) == 3
    assert texts["generated"] == texts["generated, junk"]
    assert texts["report"] != texts["report, junk"] and texts["report"] != texts["generated"]
    assert [learner.evaluate(1, "test", step).texts for step in (1, 2, 3)] == [[text] for text in texts["generated"]]
    learner.cohort = learner.cohort.until(3)  # validation has no visit before any more
    assert len(learner.evaluate(1, "validation").texts) == 1


def generator_of(targets):
    generator = build_model(MODEL)
    model = add_lora(generator, targets=targets, rank=2, alpha=8, seed=0)
    with torch.no_grad():  # an adapter that has learnt something
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    return generator


def studies(*which, folder=None):
    """Samples of some visits and their batch; visit i has SLICES[i] slices of noise, prepared in ``folder``."""
    samples = []
    for i in which:
        visit = Visit(f"p{i}", "v1", datetime(2020, 1, 1), Path("x"), "clear", "ct")
        samples.append(Sample(visit, None, "F", 1, "train", prepared=folder and folder / f"{i:040x}.npy"))
    return samples, rows(noise(3, there=SLICES), list(which))


def slices_seen(generator):
    """How many slices pass the first stage from now on, in a list of one number."""
    count = [0]
    stage = generator.encoder.stage_modules()[0]
    stage.register_forward_pre_hook(lambda module, inputs: count.__setitem__(0, count[0] + len(inputs[0])))
    return count


@pytest.mark.parametrize(("targets", "depth"), [(CVT_TARGETS, 0), (LAST_STAGE, 2), (DECODER_TARGETS, 3)])
def test_tokens_are_those_of_the_plain_way_and_the_stages_before_the_first_adapter_are_passed_once(targets, depth):
    generator = generator_of(targets)
    frozen = FrozenStages(generator)
    assert frozen.depth == depth
    samples, images = studies(0, 1, 2)
    plain, ours = generator.tokens(images), frozen.tokens(samples, images)
    torch.testing.assert_close(ours[images.slice_mask], plain[images.slice_mask], rtol=1e-5, atol=1e-6)

    count = slices_seen(generator)
    again = frozen.tokens(*studies(2, 0))
    assert (count[0] == 0) is (depth > 0)
    short = FrozenStages(generator, limit=0)
    assert torch.equal(short.tokens(samples, images), ours) and torch.equal(short.tokens(samples, images), ours)
    assert count[0] >= 2 * sum(SLICES), "what does not fit in memory is computed again"
    if depth:
        assert torch.equal(again[0, : SLICES[2]], ours[2, : SLICES[2]]), "the batch does not matter"
        assert torch.equal(again[1, : SLICES[0]], ours[0, : SLICES[0]])


@pytest.mark.parametrize("change", ["image", "adapter", "frozen weights"])
def test_what_was_changed_since_is_seen_anew(tmp_path, change):
    """An image between two tasks of a process, whose prepared file has another name then; an adapter by training."""
    generator = generator_of(LAST_STAGE)
    frozen, (samples, images) = FrozenStages(generator), studies(0, folder=tmp_path)
    before = frozen.tokens(samples, images)
    with torch.no_grad():
        if change == "image":
            images.images = 255 - images.images
            samples = [replace(sample, prepared=tmp_path / f"{1:040x}.npy") for sample in samples]
        elif change == "adapter":
            for name, parameter in generator.named_parameters():
                parameter.mul_(2 if ".lora_B." in name else 1)
        else:
            next(generator.encoder.parameters()).mul_(1.5)
            frozen = FrozenStages(generator)  # of the next process
    after = frozen.tokens(samples, images)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, generator.tokens(images), rtol=1e-5, atol=1e-6)
