"""Where a site computes and what it holds in memory: told before, halved where it is short, computed again."""

from concurrent.futures import ProcessPoolExecutor
from resource import RUSAGE_SELF, getrusage

import learners
import pytest
import torch
from adapted_models import shake
from batches import kept_bytes, noise
from learners import MODEL, SmallMemory, gradients
from ranked import CONTEXT
from refused import refused
from tables import cases
from tiny_models import write_llama
from tiny_vlms import vlm_config, write_gemma

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.learning.device import choose_device, device_of_each
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import adamw
from fedtar_flare.methods.fedpeft import PEFTConfig, PEFTLearner
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.runtime.requirements import AdaptedModel, require_memory, update_memory
from fedtar_flare.site.site_file import SiteConfig

FACTOR = 1.5
"""Of estimate and peak, either way, as the reference of the site file says."""


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs."""

    def pretend(count, bfloat16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bfloat16)

    return pretend


@pytest.mark.parametrize(("count", "bfloat16", "arguments", "chosen"), cases(__file__, "devices.yaml"))
def test_the_file_says_where_and_how_and_a_small_model_leaves_the_gpu_alone(gpus, count, bfloat16, arguments, chosen):
    gpus(count, bfloat16)
    assert choose_device(*arguments) == tuple(chosen)
    with pytest.raises(ConfigError, match=f"this machine shows {count} GPU"):
        choose_device("cuda:2")


def test_each_process_has_a_gpu_or_none_has(gpus, monkeypatch):
    gpus(0)
    assert device_of_each("auto", 2) == "cpu"
    gpus(2)
    assert [device_of_each(*of) for of in (("auto", 2), ("cuda", 2), ("cpu", 3))] == ["cuda", "cuda", "cpu"]
    with pytest.raises(ConfigError, match=r"shows 2 GPU\(s\)"):
        device_of_each("auto", 3)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert choose_device(parameters=1) == ("cuda", True), "as its process group, one GPU each"


def update(config, reports, checkpointing=False):
    model = build_model(config)
    add_lora(model, targets=config.lora_targets, rank=4, seed=0)
    if checkpointing:
        model.recompute_layers()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    ids, labels = build_tokenizer(config).batch(["No pleural effusion. " * config.max_length] * reports)
    model(noise(reports, slices=config.slices, size=config.image_size), ids, labels).mean().backward()
    optimizer.step()


def estimate_and_peak(config, reports, checkpointing):
    """Bytes of an update; the peak is that above a process which has computed something already."""
    torch.set_num_threads(1)
    update(preset("tiny"), 1)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    training = TrainingConfig(batch_size=reports, gradient_checkpointing=checkpointing)
    needs = update_memory(AdaptedModel(config, LoRAConfig()), training, 0, half=False, on_cpu=True)
    update(config, reports, checkpointing)
    return sum(needs.values()) - needs["the process"], 1024 * (getrusage(RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.slow
def test_the_estimate_is_near_the_peak_of_a_process_that_makes_an_update(tmp_path):
    """Of every family of models, each in a process of its own: a peak is never given back."""
    vlm = vlm_config(write_gemma(tmp_path, width=256), max_length=90, slices=2, image_size=28)
    for case in ((preset("small"), 12, False), (preset("small"), 12, True), (vlm, 24, False)):
        with ProcessPoolExecutor(1, CONTEXT) as pool:
            estimate, peak = pool.submit(estimate_and_peak, *case).result()
        assert 1 / FACTOR < estimate / peak < FACTOR, (case, estimate, peak)


@pytest.mark.parametrize("limited", ["machine", "container"])
def test_a_site_without_a_gpu_refuses_by_numbers_what_it_cannot_hold(tmp_path, monkeypatch, limited):
    asked, site = AdaptedModel(preset("small"), LoRAConfig()), SiteConfig(source="synthetic", device="cpu")
    (file := tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr("fedtar_flare.imaging.limits.CONTAINER_LIMIT", file)
    require_memory(asked, TrainingConfig(), Timeline(1), site)
    if limited == "machine":
        monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**9 // 4096}[name])
    else:
        file.write_text("1000000000\n")
    helps = r"'small' needs .* 64 reports at once; cpu has 1.00 GB.*micro_batch.*lora_rank"
    with pytest.raises(ConfigError, match=helps):
        require_memory(asked, TrainingConfig(batch_size=64), Timeline(1), site)
    few = TrainingConfig(batch_size=64, micro_batch=1, gradient_checkpointing=True)
    monkeypatch.setattr("fedtar_flare.runtime.requirements.getrusage", lambda who: type("", (), {"ru_maxrss": 0}))
    require_memory(asked, few, Timeline(1), site)


@pytest.fixture
def small(learner_of):
    def make(most=10**6, late=False):
        learner = learner_of(SmallMemory, local_steps=2, batch_size=5)
        learner.most, learner.late = most, late
        return learner

    return make


def test_training_goes_on_in_halves_and_learns_the_same(small):
    whole, halved = small(), small(most=2)
    expected, trained = whole.train(1, 3), halved.train(1, 3)
    assert halved.sizes[:4] == [5, 2, 2, 1] and max(halved.sizes[1:]) == 2, "halved once, and remembered"
    assert trained.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, value in expected.update.items():
        torch.testing.assert_close(trained.update[name], value, rtol=1e-2, atol=1e-4)
    assert halved.validate().loss == pytest.approx(whole.validate().loss, rel=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_evaluation_goes_on_in_halves_and_scores_the_same(small, late):
    whole, halved = small().evaluate(1), (learner := small(3, late)).evaluate(1)
    assert max(learner.sizes) > 3 >= learner.sizes[-1]
    assert halved.texts == whole.texts and halved.samples == whole.samples
    for mine, other in zip(halved.rows, whole.rows, strict=True):
        assert mine["token_loss"] == pytest.approx(other["token_loss"], rel=1e-5)
        assert {**mine, "token_loss": 0} == {**other, "token_loss": 0}
    with refused("out-of-memory"):
        small(most=0).evaluate(1)


ROWS = 4


@pytest.fixture
def shaken_learner_of(cohort):
    """A learner of a method, with every trained parameter off its start, where half of all gradients vanish."""

    def make(kind=ReportLearner, *, model=None, **settings):
        model = MODEL.replace(**(model or {}))
        own = {"patient": PatientConfig(patients_per_component=1)} if kind is PatientLearner else {}
        learner = learners.learner_of(cohort, kind, model=model, **own, **settings)
        for module in (learner.model, getattr(learner, "patient", None) or torch.nn.Module()):
            shake(module, 0.05)
        return learner

    return make


def samples_of(learner):
    """Visits of as many patients."""
    by_patient = {sample.visit.patient_id: sample for sample in learner.cohort.samples("train")}
    return list(by_patient.values())[:ROWS]


def one_pass(learner):
    return gradients(learner, samples_of(learner))


def require_equal_with_and_without(learner):
    """The same losses and gradients, bit for bit, and less that is held for them."""
    held = []
    for _ in range(2):
        samples, parameters = samples_of(learner), (*learner.model.parameters(), *learner.personal_parameters())
        images = learner.images(samples)
        kept = kept_bytes(parameters, lambda: learner.training_losses(samples, images, "s"))  # noqa: B023
        held.append((kept, *one_pass(learner)))
        learner.generator.recompute_layers()
    (whole, loss, plain), (less, again, other) = held
    assert loss == again and torch.equal(plain, other) and bool(plain.any()) and less < whole


PROMPTS = "diagnosis.*"
CASES = {
    "FedAvg, further parameters whole": {"exchange": ("*crossattention*weight", "projection.weight")},
    "FedTAR, in parts": {"kind": PatientLearner, "micro_batch": 3},
    "FedTAR, bfloat16": {"kind": PatientLearner, "precision": "bfloat16"},
    "FedPEFT, words in every layer": {"kind": PEFTLearner, "peft": PEFTConfig(kind="prefix"), "exchange": (PROMPTS,)},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_the_same_bits(shaken_learner_of, case):
    require_equal_with_and_without(shaken_learner_of(**CASES[case]))


def test_a_decoder_that_reads_the_image_as_a_prefix_too(shaken_learner_of, tmp_path):
    llama = {"decoder": "prefix", "decoder_name": str(write_llama(tmp_path)), "decoder_dtype": "bfloat16"}
    targets = ["encoder.*.dense", "decoder.*.q_proj", "decoder.*.v_proj"]
    model = {**llama, "tokenizer": "decoder", "lora_targets": targets}
    require_equal_with_and_without(shaken_learner_of(PatientLearner, model=model))


def test_memory_that_runs_out_in_the_recomputation_is_answered_by_halves(shaken_learner_of):
    learner = shaken_learner_of(PatientLearner)
    expected = one_pass(learner)
    sizes, most = [], 2

    def limited(module, args):
        if torch._C._current_graph_task_id() >= 0:
            sizes.append(len(args[0]))
            if len(args[0]) > most:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    learner.generator.decoder.transformer.h[0].ln_2.register_forward_pre_hook(limited)
    learner.generator.recompute_layers()
    torch.testing.assert_close(one_pass(learner), expected, rtol=1e-3, atol=1e-5)
    assert sizes[:3] == [ROWS, 2, 2] and max(sizes[1:]) == 2
    most = 0
    with pytest.raises(DataError, match="does not hold one report"):
        one_pass(learner)
