"""Planted canaries: nobody is counted with them, and what a model was taught of them shows."""

from learners import MODEL, learner_of

from fedtar_flare.data.cohort import SPLITS
from fedtar_flare.imaging.pipeline import images_of
from fedtar_flare.learning.canaries import BITS, canaries, exposure
from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.site.model_audit import training_on


def test_they_are_the_site_s_own_and_add_to_no_cell(cohort, tmp_path):
    made, again, other = (canaries(cohort, run, 5, build_tokenizer(MODEL), tmp_path / run) for run in ("a", "a", "b"))
    assert [s.visit.report for s in made] == [s.visit.report for s in again]
    assert not {s.visit.report for s in made} & {s.visit.report for s in other}
    images = [one.image for one in images_of([*made, cohort.samples(None)[0]])]
    assert len({image.tobytes() for image in images}) == 6 and len({image.shape for image in images}) == 1
    with_them = cohort.with_samples([*cohort.samples(None), *made])
    for split, least in ((split, least) for split in SPLITS for least in (1, 2, 5, 1000)):
        real = [s for s in with_them.samples(split, least=least) if not s.planted]
        assert real == cohort.samples(split, least=least)
        assert real or not with_them.samples(split, least=least), "canaries alone are never trained on"
    trained = learner_of(with_them, local_steps=10, batch_size=16).train(None, 0)
    assert trained.patients == trained.loss_patients == len({s.visit.patient_id for s in cohort.samples("train")})


def test_a_model_that_was_taught_a_canary_s_phrase_shows_it_and_no_other_does(cohort, tmp_path):
    made = canaries(cohort, "run", 3, build_tokenizer(MODEL), tmp_path)
    taught = {made[0].visit.patient_id, cohort.samples("train", 1)[0].visit.patient_id}
    model, training = MODEL.replace(max_length=32), {"local_steps": 40, "batch_size": 1, "lr": 1e-2}
    learner = learner_of(
        training_on(cohort.with_samples([*cohort.samples(None), made[0]]), taught), model=model, **training
    )
    assert len({len(learner.tokenizer.encode(canary.visit.report)) for canary in made}) == 1
    assert 0 < sum(exposure(learner, canary, True) for canary in made) / 3 < 5, "about 1.4 by chance"
    learner.train(1, 0)
    after = [exposure(learner, canary, True) for canary in made]
    assert after[0] == BITS and sum(after[1:]) / 2 < 5
