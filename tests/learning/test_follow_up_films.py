"""Follow-up radiographs with reports in free text, read by rules: changes are claimed only of what is shown."""

from datetime import datetime, timedelta

import learners
import pytest
import torch
from kits import write_noise

from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Patient, Visit
from fedtar_flare.imaging.pipeline import prepare_cohort
from fedtar_flare.learning.comparison import NONE, UNCERTAIN
from fedtar_flare.learning.labels import UNKNOWN
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.config import preset

KEY = b"k" * 16
MODELS = {"encoder and decoder": preset("tiny", slices=1, max_length=24, num_beams=1)}
MODELS["vision-language"] = preset("vlm-tiny", slices=1, max_length=24, num_beams=1)
REPORTS = {  # by patient, days since the first visit and what is written; the first film of "cut" cannot be read
    "often": [
        (0, "Small right pleural effusion. No pneumothorax. Mild cardiomegaly."),
        (0.25, "Moderate right pleural effusion. Cardiomegaly is unchanged."),
        (400, "The effusion has resolved. There is a new small pneumothorax."),
    ],
    "once": [(0, "Stable moderate cardiomegaly. Possible pneumonia.")],
    "cut": [(0, "Small left effusion."), (9, "The left effusion is slightly larger. No edema.")],
    "late": [(0, "The lungs are clear. No effusion."), (2000, "Large left effusion.")],
}
SHOWN = {("often", 0.25), ("often", 400), ("late", 2000)}
"""Visits that have a visit before whose film can be read."""


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """A site's cohort, all in training, by what is shown of the visit before."""
    folder = tmp_path_factory.mktemp("films")
    patients = []
    for number, (patient_id, visits) in enumerate(REPORTS.items()):
        made = []
        for i, (days, report) in enumerate(visits):
            image = write_noise(folder / f"{patient_id}-{i}.png", 10 * number + i)
            if (patient_id, i) == ("cut", 0):
                image.write_bytes(image.read_bytes()[:200])
            moment = datetime(2020, 1, 1) + timedelta(days=days)
            made.append(Visit(patient_id, f"{patient_id}-{days:g}", moment, image, report, "radiograph", age=50.0))
        patients.append(Patient(patient_id, "F", tuple(made)))

    def of(prior):
        splits = dict.fromkeys(REPORTS, "train")
        cohort = Cohort("site-1", patients, key=KEY, timeline=Timeline(3, prior=prior), splits=splits)
        return prepare_cohort(cohort, MODELS["vision-language"], folder / "prepared")

    return of


def learner_of(cohort, model, **diagnosis):
    """A learner whose head sees something."""
    settings = DiagnosisConfig(labeler="chexpert-rules", certain=0.0, **diagnosis)
    learner = learners.learner_of(
        cohort, PatientLearner, model=model, patient=PatientConfig(enabled=False), diagnosis=settings, batch_size=2
    )
    generator, head = torch.Generator().manual_seed(5), learner.generator.diagnosis.head
    with torch.no_grad():
        for parameter in (head.weight, head.bias, head.change_weight, head.change_bias):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return learner


def read_of(learner, samples):
    images = learner.images(samples)
    return learner.generator.diagnosis.read(learner.encoded(samples, images))


def name_of(sample):
    return sample.visit.visit_id.rpartition("-")


@pytest.mark.parametrize(
    ("model", "prior"),
    [*(("encoder and decoder", prior) for prior in ("none", "report", "image", "report+image")),
     ("vision-language", "report+image")],
)  # fmt: skip
def test_a_change_is_claimed_of_what_is_shown_and_of_nothing_else(films, model, prior):
    learner = learner_of(films(prior), MODELS[model])
    samples, reader = learner.cohort.samples("train"), learner.generator.diagnosis.reader
    assert len(samples) == 7 and sum(learner.cohort.rejected.values()) == 1
    reading = read_of(learner, samples)
    claims = (reading.changes != NONE) & (reading.changes != UNCERTAIN)
    for row, sample in enumerate(samples):
        patient, _, days = name_of(sample)
        shown = prior != "none" and (patient, float(days)) in SHOWN
        assert (sample.prior is not None) == shown
        claimed = {name for name, there in zip(reader.findings, claims[row].tolist(), strict=True) if there}
        if not shown:
            assert not claimed
        elif prior == "report":
            before = zip(reader.findings, reader.stated_levels(sample.prior.report), strict=True)
            assert claimed <= {name for name, level in before if level != UNKNOWN}
        alone = read_of(learner, [sample])
        assert torch.equal(alone.levels[0], reading.levels[row]) and torch.equal(alone.changes[0], reading.changes[row])
    assert bool(claims.any()) == (prior != "none") and not bool(claims[:, 0].any()), "no finding is none to compare"
