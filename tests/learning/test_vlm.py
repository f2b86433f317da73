"""Vision-language models of two families as report generators and in every learner's place; tiny random ones."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from adapted_models import adapted, patients, shake, written_out_weights
from batches import noise, rows
from command import fedtar_here as here
from kits import write_noise
from learners import gradients, learner_of
from tiny_vlms import FAMILIES, REPORTS, batch, vlm_config
from torch.func import functional_call

from fedtar_flare.core.errors import DataError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.learning.labels import labeler
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.adapters.peft_file import ADAPTER_INFO
from fedtar_flare.models.adapters.visit_shares import VisitShares
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import VLM_TARGETS, ModelConfig
from fedtar_flare.models.vlm import EARLIER, VisionLanguageGenerator
from fedtar_flare.reporting.examples import EXAMPLES_FILE, read_examples
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import run_in_process
from fedtar_flare.synthetic.cohort import synthetic_cohort

PROMPT = ModelConfig.model_fields["prompt"].default


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return build_tokenizer(vlm_config(folder))


@pytest.fixture(scope="module")
def shown(cohort_of):
    """Patients who show two visits before, with their images."""
    return cohort_of("report+image", 2)


def test_patient_adapters_act_on_their_own_sample_as_written_out(folder, tokenizer):
    base = build_model(vlm_config(folder)).double()
    plain = copy.deepcopy(base)
    model, patient = adapted(base, VLM_TARGETS)
    (q, steps), (ids, labels) = patients(), tokenizer.batch(REPORTS)
    shake(model)
    with torch.no_grad():
        before = base(batch(), ids, labels)
        with patient.adapt(q, steps):
            assert torch.equal(base(batch(), ids, labels), before), "untrained, they change nothing"
        shake(patient)
        with patient.adapt(q, steps):
            losses, drafts = base(batch(), ids, labels), base.generate(batch(), 2, 6).tolist()
        assert torch.equal(base(batch(), ids, labels), before)
        for i in range(3):
            weights = written_out_weights(plain, model, patient, q[i], steps[i])
            result = functional_call(plain, weights, (batch(i), ids[i : i + 1], labels[i : i + 1]))
            torch.testing.assert_close(result[0], losses[i], rtol=1e-5, atol=1e-6)
            with patient.adapt(q[i : i + 1], steps[i : i + 1]):
                assert tokenizer.decode(base.generate(batch(i), 2, 6)[0].tolist()) == tokenizer.decode(drafts[i])
    with patient.adapt(q, steps):
        base(batch(), ids, labels)[1].backward()
    assert patient.time_embedding.grad.any(1).nonzero().flatten().tolist() == [int(steps[1]) - 1], "its own step"
    assert not any(p.requires_grad for n, p in base.named_parameters() if "vis" in n)


def test_two_visits_before_are_turns_with_their_own_images_reports_and_days(shown, folder):
    learner = learner_of(shown, model=vlm_config(folder))
    last = next(s for s in shown.samples(None, 3) if s.before and s.before.prior)
    samples = [last.before, last, last.before.before]
    images = learner.images(samples)
    turns, views = learner.generator._conversation(images, 1)
    days = [round((last.visit.acquired - v.acquired).total_seconds() / 86_400) for v in (last.before.prior, last.prior)]
    texts = ["".join(part.get("text", "") for part in turn["content"]) for turn in turns]
    assert [text.startswith(EARLIER.format(days=n)) for text, n in zip(texts[::2], days, strict=False)] == [True] * 2
    assert texts[1::2] == [last.before.prior.report, last.prior.report] and len(turns) == 5
    whole = torch.cat([images.images[row][images.slice_mask[row]] for row in (2, 0, 1)])
    assert torch.equal(torch.stack(views), whole)
    assert [len(learner.generator._conversation(images, row)[0]) for row in (0, 2)] == [3, 1]


def test_findings_stand_in_what_is_asked_by_the_report_in_training_and_by_the_head_in_a_draft(shown, folder):
    """As if the question of a model without a head had the same words."""

    def asked(words):
        plain = learner_of(shown, PatientLearner, model=vlm_config(folder, prompt=f"{PROMPT} {words}"))
        plain.load_for_writing(learner.private())
        return plain

    diagnosis = DiagnosisConfig(labeler="synthetic", candidates=3, complete=True)  # what no beam says, with no room
    learner = learner_of(shown, PatientLearner, model=vlm_config(folder), diagnosis=diagnosis)
    shake(learner.patient)
    branch, samples = learner.generator.diagnosis, [s for s in shown.samples("train") if s.prior][:3]
    prompts = branch.to_words(learner.findings.prompts(samples))
    news = [[name for name, what in labeler("synthetic").changes(s.visit.report) if what == "new"] for s in samples]
    pairs = zip(news, prompts, strict=True)
    assert any(news) and all(f"{n.replace('_', ' ')} (new)" in words for own, words in pairs for n in own)
    alone, words = learner.images(samples[:1], prior=False), prompts[0]
    learner.training_losses(samples[:1], alone, "s").sum().backward()
    assert bool(branch.head.weight.grad.any())
    assert bool(learner.patient.time_embedding.grad.any())
    with torch.no_grad():
        loss = learner.training_losses(samples[:1], alone, "s")
        torch.testing.assert_close(loss, asked(words).report_losses(samples[:1], alone))
        branch.head.bias[:, 0], name = -9, branch.reader.findings[2].replace("_", " ")
        branch.head.bias[2, 0] = 9
        plain, read = asked(f"Findings: small {name}."), learner.report_losses(samples[:1], alone)
        torch.testing.assert_close(read, plain.report_losses(samples[:1], alone))
        assert read != loss and learner.write(samples[0], alone)[0] == plain.write(samples[0], alone)[0]


def test_layers_computed_again_and_private_updates_give_the_gradient_and_a_resumed_site_goes_on(shown, folder):
    settings, samples = {"model": vlm_config(folder), "batch_size": 4, "lr": 0.01}, shown.samples("train")[:4]
    loss, plain = gradients(learner_of(shown, PatientLearner, **settings), samples)
    again = gradients(learner_of(shown, PatientLearner, gradient_checkpointing=True, **settings), samples)
    assert again[0] == loss and torch.equal(again[1], plain) and bool(plain.any())
    quiet = {"noise_multiplier": 1e-30, "max_grad_norm": 1e9}
    private = gradients(learner_of(shown, PatientLearner, **settings, **quiet), samples)
    torch.testing.assert_close(private[1], plain)
    private = learner_of(shown, PatientLearner, **settings, noise_multiplier=1.0, local_steps=1).train(None, 0)
    assert private.skipped_updates == 0 and any(bool(value.any()) for value in private.update.values())
    first, second = (learner_of(shown, PatientLearner, **settings) for _ in range(2))
    first.train(1, 7)
    second.load_shared(first.shared())
    second.load_private(first.private())
    one, other = first.train(2, 8).update, second.train(2, 8).update
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
def test_a_draft_is_the_text_of_the_run_with_the_site_s_own_adapters(tmp_path, monkeypatch):
    """Shown the same two visits before; of films, both views."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path))
    model = {"decoder_name": str(FAMILIES["qwen"](tmp_path / "vlm")), "weights": None, "max_length": 12, "num_beams": 2}
    recipe = MethodRecipe(
        "fedtar", preset="vlm-tiny", num_rounds=1, time_steps=3, server={"evaluate_every": 1}, patient={"lr": 0.1},
        model=model | {"slices": 1, "lateral": True}, training={"local_steps": 4, "batch_size": 4, "lr": 0.01},
        data={"synthetic_patients": 10, "prior": "report+image", "priors": 2},
    )  # fmt: skip
    adapter = run_in_process(recipe, 1, tmp_path / "run") / "adapter"
    (examples,) = (tmp_path / "state").rglob(EXAMPLES_FILE)
    timeline = Timeline(3, prior="report+image", priors=2)
    made = synthetic_cohort("site-1", folder=tmp_path / "synthetic", patients=10, timeline=timeline, seed=0)
    run = {example.reference: example.draft for example in read_examples(examples).examples}
    sample = next(s for s in made.samples("test") if s.before and s.before.prior and s.visit.report in run)
    before = []
    for i, one in enumerate((sample, sample.before)):
        (tmp_path / f"{i}.txt").write_text(one.prior.report)
        before += ["--prior-image", one.prior.image, "--prior-report", tmp_path / f"{i}.txt"]
        before += ["--prior-days", one.days_since_prior]
    known = ("--patient-id", sample.visit.patient_id, "--age", sample.visit.age, "--sex", sample.sex)
    own = (*before, "--state", examples.parent, "--time-step", sample.time_step, *known)

    def drafted(*options):
        code, out, err = here("generate", sample.visit.image, "--adapter", adapter, "--format", "json", *options)
        return json.loads(out)["text"] if code == 0 else err

    assert drafted(*own) == run[sample.visit.report]
    turns, converse = [], VisionLanguageGenerator._conversation

    def count(*arguments):
        made = converse(*arguments)
        turns.append(["".join(part.get("text", "+") for part in one["content"]) for one in made[0]])
        return made

    monkeypatch.setattr(VisionLanguageGenerator, "_conversation", count)
    assert drafted(*own[:6], *own[12:]) != "" != drafted(*before) and list(map(len, turns)) == [3, 5]
    about = json.loads((adapter / ADAPTER_INFO).read_text()) | {"modality": ["ct", "radiograph"]}
    (adapter / ADAPTER_INFO).write_text(json.dumps(about))
    films = [write_noise(tmp_path / f"{i}.png", i) for i in range(4)]
    sample, report = replace(sample, visit=replace(sample.visit, image=films[0])), tmp_path / "0.txt"
    shown = ("--lateral", films[1], "--prior-image", films[2], "--prior-lateral", films[3], "--prior-days", 9)
    assert drafted(*shown, "--prior-report", report) and [t.count("frontal:+lateral:+") for t in turns[2]] == [1, 0, 1]
    assert "each as often" in drafted(*shown, *shown[2:4])
    assert "data.priors=2" in drafted(*before, *before[:6]) and "as often" in drafted(*before, *before[:2])


def test_adapted_vision_layers_need_as_many_images_of_each(folder, tokenizer):
    model, patient = adapted(base := build_model(vlm_config(folder)).double(), ("decoder.*vis*.fc1",))
    shake(patient)
    (q, steps), (ids, labels), alike = patients(), tokenizer.batch(REPORTS), noise(3, slices=2)
    (shares := VisitShares(model, "default")).begin([*"abc"])
    for acts in (shares.equal([*"abc"]), patient.adapt(q, steps)):
        with torch.no_grad(), acts, pytest.raises(DataError, match="different numbers of images"):
            base(batch(), ids, labels)
    with patient.adapt(q, steps), torch.no_grad():
        losses = base(alike, ids, labels)
    with patient.adapt(q[1:2], steps[1:2]), torch.no_grad():
        torch.testing.assert_close(base(rows(alike, 1), ids[1:2], labels[1:2]), losses[1:2])
