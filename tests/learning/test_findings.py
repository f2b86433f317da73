"""What was read of a visit, as a draft gives it: the same reading as the writer's, and nothing that is not known."""

import learners
import pytest
import torch
from batches import noise

from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.learning.comparison import CHANGES, UNKNOWN, ComparisonHead
from fedtar_flare.learning.findings import ReadFinding
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.report_generator import Encoded

CERTAIN = {"presence": 0.98, "degree": 0.7, "change": 0.83}
READ = (
    ReadFinding("effusion", "right", "small", "increased", CERTAIN),
    ReadFinding("Lung Opacity", None, "large", None, CERTAIN | {"change": None}),
    ReadFinding("cavity", None, None, "resolved", CERTAIN | {"degree": None}),
)


@pytest.fixture(scope="module")
def learner(cohort_of):
    """One whose head has random weights."""
    diagnosis, patient = DiagnosisConfig(labeler="synthetic", certain=0.3), PatientConfig(enabled=False)
    learner = learners.learner_of(cohort_of("image"), PatientLearner, patient=patient, diagnosis=diagnosis)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.generator.diagnosis.head.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=generator))
    return learner


def followed_up(learner):
    return next(sample for sample in learner.cohort.samples("train") if sample.prior is not None)


def test_a_draft_comes_with_what_its_prompts_tell_after_one_pass_through_the_encoder(learner, monkeypatch):
    sample = followed_up(learner)
    images = learner.images([sample])
    [text], passes = learner.generate([sample], images), []
    tokens = learner._frozen.tokens
    monkeypatch.setattr(learner._frozen, "tokens", lambda *args: passes.append(args) or tokens(*args))
    written, findings = learner.write(sample, images)
    assert written == text and len(passes) == 2, "this visit and the one before"
    reading = learner.generator.diagnosis.read(learner.encoded([sample], images))
    names = learner.generator.diagnosis.reader.findings
    by_name = {"_".join(filter(None, (read.finding.replace(" ", "_"), read.side))): read for read in findings}
    assert min(len({read.change for read in findings}), len({read.degree for read in findings})) > 2
    for i, name in enumerate(names):
        level, change = int(reading.levels[0, i]), CHANGES[reading.changes[0, i]]
        assert (name in by_name) == (level > 0 or change == "resolved")
        if read := by_name.get(name):
            assert read.degree == (None, "small", "moderate", "large")[level] and read.change == change
            assert read.certainty["presence"] == round(reading.presence[0, i].item(), 2)
            assert read.certainty["change"] == round(reading.certainty[0, i].item(), 2) >= 0.3 or change == "uncertain"
            assert (read.certainty["degree"] is None) == (level == 0)


def test_without_a_visit_before_no_change_is_claimed_and_without_a_branch_nothing_is_read(learner, cohort_of):
    sample = followed_up(learner)
    alone = learner.images([sample], prior=False)
    hidden = learner.images([sample])
    hidden.prior = PriorBatch(torch.tensor([9.0]), noise(size=learners.MODEL.image_size, count=1))
    hidden.prior.images.slice_mask[:] = False
    for images in (alone, hidden):
        findings = learner.read_findings(sample, images, "")
        assert findings and {(f.change, f.certainty["change"], f.slices[1]) for f in findings} == {(None, None, None)}
    plain = learners.learner_of(cohort_of("report+image"), ReportLearner)
    assert plain.write(sample, plain.images([sample]))[1] is None


def test_the_key_slice_is_the_one_that_holds_most_of_the_attention(learner):
    head = ComparisonHead(3, 8, torch.Generator().manual_seed(2))
    tokens, mask = torch.randn(2, 5, 4, 8), torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    slices = head.key_slices(tokens, mask)
    for row in range(2):
        for finding in range(3):
            x = torch.nn.functional.layer_norm(tokens[row, : int(mask[row].sum())], (8,))
            weights = (x @ head.queries[finding] / 8**0.5).flatten().softmax(0).view(x.shape[:2]).sum(1)
            assert slices[row, finding] == weights.argmax()
    assert (head.key_slices(tokens, torch.zeros_like(mask)) == UNKNOWN).all()
    branch, batch = learner.generator.diagnosis, noise(1, size=learners.MODEL.image_size)
    seen = Encoded(learner.generator.tokens(batch), batch.slice_mask)
    assert (branch.key_slices(seen)[1] == UNKNOWN).all()


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("Small right pleural effusion.", "right"),
        ("Bilateral pleural effusions.", "both"),
        ("Pleural effusion. Left pneumothorax.", None),
        ("No pleural effusion on the left.", None),
    ],
)
def test_a_side_is_that_of_the_finding_s_name_or_else_of_the_draft(text, side):
    from fedtar_flare.learning.findings import _name_and_side
    from fedtar_flare.learning.labels import labeler

    assert _name_and_side("Pleural Effusion", text, labeler("chexpert-rules")) == ("Pleural Effusion", side)
    assert _name_and_side("effusion_left", text, labeler("synthetic")) == ("effusion", "left")
