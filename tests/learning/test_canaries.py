"""Planted canaries: nobody is counted with them, and what a model was taught of them shows."""

from collections import Counter

from learners import MODEL, learner_of

from fedtar_flare.data.cohort import SPLITS
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.learning.canaries import BITS, canaries, exposure
from fedtar_flare.models.build import build_tokenizer


def test_they_are_the_site_s_own_and_add_to_no_cell(cohort, tmp_path):
    given = (cohort, "run-1", 5, build_tokenizer(MODEL))
    made, again = canaries(*given, tmp_path), canaries(*given, tmp_path / "elsewhere")
    assert [s.visit.report for s in made] == [s.visit.report for s in again]
    other = canaries(cohort, "run-2", 5, build_tokenizer(MODEL), tmp_path)
    assert not {s.visit.report for s in made} & {s.visit.report for s in other}
    assert len({image.image.tobytes() for image in images_of(made)}) == 5
    assert images_of(made)[0].image.shape == images_of(cohort.samples(None)[:1])[0].image.shape
    with_them = cohort.also_with(made)
    for least in (1, 2, 5, 1 + max(Counter(s.time_step for s in cohort.samples("train")).values())):
        for split in SPLITS:
            real = [s for s in with_them.samples(split, least=least) if not s.planted]
            assert real == cohort.samples(split, least=least)
            assert real or not with_them.samples(split, least=least), "canaries alone are never trained on"
    learner = learner_of(with_them, local_steps=10, batch_size=16)
    trained = learner.train(None, 0)
    everybody = {s.visit.patient_id for s in cohort.samples("train")}
    assert trained.patients == trained.loss_patients == len(everybody)


def test_a_model_that_was_taught_a_canary_s_phrase_shows_it_and_no_other_does(cohort, tmp_path):
    made = canaries(cohort, "run", 3, build_tokenizer(MODEL), tmp_path)
    patient = cohort.samples("train", 1)[0].visit.patient_id
    taught = cohort.also_with(made[:1]).training_on({made[0].visit.patient_id, patient})
    learner = learner_of(taught, model=MODEL.replace(max_length=32), local_steps=40, batch_size=1, lr=1e-2)
    before = [exposure(learner, canary, True) for canary in made]
    assert 0 < sum(before) / 3 < 5, "about 1.4 by chance"
    assert len({len(learner.tokenizer.encode(canary.visit.report)) for canary in made}) == 1
    learner.train(1, 0)
    after = [exposure(learner, canary, True) for canary in made]
    assert after[0] == BITS and sum(after[1:]) / 2 < 5
