"""Vision-language models in every learner's place: private updates, resuming, checkpointing, drafting, a suite."""

import json

import pytest
import torch
from command import fedtar_here as here
from learners import learner_of
from tiny_vlms import FAMILIES, vlm_config

from fedtar_flare.data.timeline import Timeline
from fedtar_flare.errors import ConfigError
from fedtar_flare.learning.patient_privacy import generator_of
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig
from fedtar_flare.methods.fedpeft import PEFTConfig, PEFTLearner
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.vlm import EARLIER
from fedtar_flare.reporting.examples import EXAMPLES_FILE, read_examples
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.suite.engine import run_in_process
from fedtar_flare.synthetic.cohort import synthetic_cohort

METHODS = ("fedtar", "fedavg_patient", "local")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def cohort(cohort_of):
    return cohort_of("report+image", 2)


def test_two_visits_before_are_turns_with_their_own_images_reports_and_days(cohort, folder):
    learner = learner_of(cohort, model=vlm_config(folder))
    last = next(s for s in cohort.samples(None, 3) if s.before and s.before.prior)
    samples = [last.before, last, last.before.before]
    images = learner.images(samples)
    turns, shown = learner.generator._conversation(images, 1)
    days = [round((last.visit.acquired - v.acquired).total_seconds() / 86_400) for v in (last.before.prior, last.prior)]
    texts = ["".join(part.get("text", "") for part in turn["content"]) for turn in turns]
    assert [text.startswith(EARLIER.format(days=n)) for text, n in zip(texts[::2], days, strict=False)] == [True] * 2
    assert texts[1::2] == [last.before.prior.report, last.prior.report] and len(turns) == 5
    whole = torch.cat([images.images[row][images.slice_mask[row]] for row in (2, 0, 1)])
    assert torch.equal(torch.stack(shown), whole)
    assert [len(learner.generator._conversation(images, row)[0]) for row in (0, 2)] == [3, 1]
    alone = [learner.report_losses([s], learner.images([s])) for s in samples]
    torch.testing.assert_close(learner.report_losses(samples, images), torch.cat(alone))
    with pytest.raises(ConfigError, match=r"data.priors: .* 'vlm' alone"):
        MethodRecipe("fedavg", preset="tiny", data={"prior": "report", "priors": 2})


def gradients(learner):
    learner._random = generator_of(0, False)
    loss = learner._accumulate(learner.cohort.samples("train")[:4], "s")
    own = [*learner.shared_parameters.values(), *learner.personal_parameters()]
    return loss, torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in own])


def test_layers_computed_again_give_the_same_bits_and_private_updates_the_same_gradient(cohort, folder):
    settings = {"model": vlm_config(folder), "batch_size": 4}
    loss, plain = gradients(learner_of(cohort, PatientLearner, **settings))
    again = gradients(learner_of(cohort, PatientLearner, gradient_checkpointing=True, **settings))
    assert again[0] == loss and torch.equal(again[1], plain) and bool(plain.any())
    noise = {"noise_multiplier": 1e-30, "max_grad_norm": 1e9}
    _, private = gradients(learner_of(cohort, PatientLearner, **settings, **noise))
    torch.testing.assert_close(private, plain, rtol=1e-3, atol=1e-6)
    trained = learner_of(cohort, PatientLearner, **settings, noise_multiplier=1.0, local_steps=1).train(None, 0)
    assert all(bool(value.isfinite().all()) for value in trained.update.values()) and trained.skipped_updates == 0


def test_a_resumed_site_goes_on_as_if_nothing_had_been(cohort, folder):
    first, second = (learner_of(cohort, PatientLearner, model=vlm_config(folder), lr=0.01) for _ in range(2))
    first.train(1, 7)
    second.load_shared(first.shared())
    second.load_private(first.private())
    one, other = first.train(2, 8), second.train(2, 8)
    assert one.loss == other.loss
    for name, value in one.update.items():
        assert torch.equal(value, other.update[name])


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (PatientLearner, {"diagnosis": DiagnosisConfig(labeler="chexpert-rules")}),
        (PEFTLearner, {"peft": PEFTConfig(kind="prompt")}),
    ],
)
def test_what_needs_an_encoder_and_a_decoder_says_so(cohort, folder, kind, own):
    with pytest.raises(ConfigError, match=r"needs an encoder and a decoder: .*'vlm'"):
        learner_of(cohort, kind, model=vlm_config(folder), **own)


def run_settings(folder, **others):
    model = {"decoder_name": str(folder), "weights": None, "max_length": 12, "num_beams": 2}
    return {
        "preset": "vlm-tiny", "num_rounds": 1, "time_steps": 2, "model": model,
        "training": {"local_steps": 4, "batch_size": 4, "lr": 0.01}, "data": {"synthetic_patients": 10}, **others,
    }  # fmt: skip


def test_a_draft_is_the_text_of_the_run_with_the_site_s_own_adapters(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    settings = run_settings(folder, server={"evaluate_every": 1}, patient={"lr": 0.1})
    adapter = run_in_process(MethodRecipe("fedtar", **settings), 1, tmp_path / "run") / "adapter"
    (examples,) = (tmp_path / "home" / "state").rglob(EXAMPLES_FILE)
    cohort = synthetic_cohort(
        "site-1", folder=tmp_path / "home" / "synthetic", patients=10, timeline=Timeline(2), seed=0
    )
    texts = {True: [], False: []}
    for sample in cohort.samples("test")[:2]:
        known = ("--patient-id", sample.visit.patient_id, "--age", sample.visit.age, "--sex", sample.sex)
        own = ("--state", examples.parent, "--time-step", sample.time_step, *known)
        for personal, arguments in ((True, own), (False, ())):
            code, out, err = here("generate", sample.visit.image, "--adapter", adapter, "--format", "json", *arguments)
            assert code == 0, err
            texts[personal].append(json.loads(out)["text"])
    assert texts[True] == [example.draft for example in read_examples(examples).examples[:2]] != texts[False]


@pytest.mark.slow
def test_a_suite_of_both_families_with_and_without_the_patient_adapters(tmp_path):
    arms = {}
    for name, write in FAMILIES.items():
        model = {"model": run_settings(write(tmp_path / name))["model"]}
        arms |= {f"{method}_{name}": {"method": method, "settings": model} for method in METHODS}
    settings = {name: value for name, value in run_settings(tmp_path).items() if name != "model"}
    file = tmp_path / "suite.yaml"
    file.write_text(json.dumps({"name": "vlms", "sites": ["site-1", "site-2"], "settings": settings, "arms": arms}))
    code, _, errors = here("compare", file, "-o", tmp_path / "out", FEDTAR_HOME=str(tmp_path / "home"))
    assert code == 0, errors
    page = next((tmp_path / "out").rglob("*.html")).read_text()
    assert all(name in page for name in arms)
