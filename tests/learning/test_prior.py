"""The visit before: what is shown and masked, that the model reads it, and that its own texts stand for reports."""

import copy
from dataclasses import replace
from datetime import datetime, timedelta

import learners
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.learning.prior import prior_batch, shown_kinds, writing_order
from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.models.config import preset

MODEL = preset("tiny", max_length=20)
BOTH = frozenset({"report", "image"})


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(MODEL)


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
    assert all(kept <= there for kept, there in zip(left, whole, strict=True))
    assert shown_kinds(samples[::-1], kinds, chance, "7/3") == left[::-1]
    assert not any(shown_kinds(samples, kinds, 1.0, "7/3"))


def test_the_masked_share_is_the_one_asked_for_and_each_kind_is_also_masked_alone():
    samples = course(range(2000))[1:]
    alone = shown_kinds(samples, {"report"}, 0.3, "a")
    assert np.mean([not kept for kept in alone]) == pytest.approx(0.3, abs=0.03)
    left = shown_kinds(samples, BOTH, 0.3, "a")
    share = {kept: np.mean([one == kept for one in left]) for kept in set(left)}
    assert share[BOTH] == pytest.approx(0.7**3, abs=0.03)
    assert share[frozenset()] == pytest.approx(0.3 + 0.7 * 0.09, abs=0.03)
    assert left != shown_kinds(samples, BOTH, 0.3, "b")


@given(st.sets(st.integers(0, 999), min_size=1, max_size=6), st.randoms())
def test_a_turn_holds_no_visit_whose_visit_before_is_still_to_come(days, random):
    samples = course(days)
    random.shuffle(samples)
    written = set()
    for turn in writing_order(samples):
        assert all(samples[i].prior is None or samples[i].prior in written for i in turn)
        written |= {samples[i].visit for i in turn}
    assert len(written) == len(samples)


def test_texts_stand_for_the_reports_and_rows_keep_their_place(tokenizer):
    samples = course([1, 5, 9])
    kinds = shown_kinds(samples, {"report"})
    assert prior_batch(samples[:1], kinds[:1], tokenizer) is None
    batch = prior_batch(samples, kinds, tokenizer)
    assert batch.images is None and batch.days.tolist() == [0.0, 4.0, 4.0]
    assert not batch.text_mask[0].any() and tokenizer.decode(batch.input_ids[2].tolist()) == "report 5"
    own = prior_batch(samples, kinds, tokenizer, texts={samples[0].visit: "a", samples[1].visit: ""})
    assert [tokenizer.decode(row) for row in own.input_ids.tolist()[1:]] == ["a", ""]
    turned = prior_batch(samples[::-1], kinds[::-1], tokenizer)
    assert torch.equal(turned.input_ids.flip(0), batch.input_ids)
    assert torch.equal(turned.text_mask.flip(0), batch.text_mask)


def test_first_visits_and_masked_ones_are_learned_from_as_without(learner_of):
    learners = {"none": learner_of("none")}
    learners |= {name: learner_of("report+image", dropout) for name, dropout in (("shown", 0.0), ("masked", 1.0))}
    first = {name: learner.train(1, 5).update for name, learner in learners.items()}
    later = {name: learner.train(2, 5).update for name, learner in learners.items()}
    same = lambda a, b: all(torch.equal(value, b[name]) for name, value in a.items())  # noqa: E731
    assert same(first["none"], first["shown"]) and same(first["none"], first["masked"])
    assert same(later["none"], later["masked"]) and not same(later["none"], later["shown"])


def test_losses_of_a_batch_are_those_of_its_samples_alone(learner_of):
    learner = learner_of("report+image")
    samples = learner.cohort.samples("train")[:5]
    assert {s.time_step for s in samples} == {1, 2, 3}, "first visits are among them"
    with torch.no_grad():
        together = learner.report_losses(samples, learner.images(samples))
        turned = learner.report_losses(samples[::-1], learner.images(samples[::-1]))
        alone = torch.cat([learner.report_losses([s], learner.images([s])) for s in samples])
        written = learner.generate(samples, learner.images(samples))
        assert written == [learner.generate([s], learner.images([s]))[0] for s in samples]
    torch.testing.assert_close(together, turned.flip(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def with_junk(cohort):
    """The cohort with all reports replaced."""
    made = copy.copy(cohort)
    spoiled = lambda v: replace(v, report=f"junk {v.visit_id}")  # noqa: E731
    made._samples = [replace(s, visit=spoiled(s.visit), prior=s.prior and spoiled(s.prior)) for s in cohort._samples]
    return made


def test_the_model_s_own_texts_and_never_a_reference_stand_for_generated(learner_of):
    texts = {}
    for prior in ("report", "generated"):
        learner = learner_of(prior)
        texts[prior] = learner.evaluate(1).texts
        samples = learner.cohort = with_junk(learner.cohort)
        texts[f"{prior}, junk"] = learner.evaluate(1).texts
        assert len(texts[prior]) == len(samples.samples("test")) == 3
    assert texts["generated"] == texts["generated, junk"]
    assert texts["report"] != texts["report, junk"] and texts["report"] != texts["generated"]
