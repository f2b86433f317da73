"""Gradient checkpointing: each method's losses and gradients bit for bit, fewer tensors kept, generation as it was."""

import learners
import pytest
import torch
from adapted_models import shake
from batches import kept_bytes
from learners import MODEL, gradients
from tiny_llama import write_llama

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedpeft import PEFTConfig, PEFTLearner
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.learner import PatientLearner

ROWS = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Settings of a model whose decoder is a tiny Llama that reads the image as a prefix."""
    folder = write_llama(tmp_path_factory.mktemp("llama"))
    targets = ["encoder.*.dense", "decoder.*.q_proj", "decoder.*.v_proj"]
    return {"decoder": "prefix", "decoder_name": str(folder), "tokenizer": "decoder", "lora_targets": targets}


@pytest.fixture
def learner_of(cohort):
    """A learner of a method, with every trained parameter off its start, where half of all gradients vanish."""

    def make(recomputed, kind=ReportLearner, *, model=None, **settings):
        torch.set_num_threads(1)
        model = MODEL.replace(**(model or {}))
        own = {"patient": PatientConfig(patients_per_component=1)} if kind is PatientLearner else {}
        learner = learners.learner_of(cohort, kind, model=model, gradient_checkpointing=recomputed, **own, **settings)
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


def recomputing(learner):
    learner.generator.recompute_layers()
    return learner


def require_equal_with_and_without(learner):
    """The same losses and gradients, bit for bit."""
    (loss, plain), (again, other) = one_pass(learner), one_pass(recomputing(learner))
    assert loss == again and torch.equal(plain, other) and bool(plain.any())


def held(learner):
    samples = samples_of(learner)
    images = learner.images(samples)
    parameters = (*learner.model.parameters(), *learner.personal_parameters())
    return kept_bytes(parameters, lambda: learner.training_losses(samples, images, "s"))


PROMPTS = "diagnosis.*"
CASES = {
    "FedAvg": {},
    "FedAvg, further parameters whole": {"exchange": ("*crossattention*weight", "projection.weight")},
    "FedTAR": {"kind": PatientLearner},
    "FedTAR, in parts": {"kind": PatientLearner, "micro_batch": 3},
    "FedTAR, bfloat16": {"kind": PatientLearner, "precision": "bfloat16"},
    **{
        f"FedPEFT, {kind}": {"kind": PEFTLearner, "peft": PEFTConfig(kind=kind)} for kind in ("adalora", "vera", "loha")
    },
    "FedPEFT, words in every layer": {"kind": PEFTLearner, "peft": PEFTConfig(kind="prefix"), "exchange": (PROMPTS,)},
}
QUICK = ("FedAvg, further parameters whole", "FedTAR, in parts", "FedTAR, bfloat16")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=() if n in QUICK else pytest.mark.slow) for n, c in CASES.items()]
)
def test_losses_and_gradients_are_the_same_bits(learner_of, case):
    require_equal_with_and_without(learner_of(False, **case))


def test_a_decoder_that_reads_the_image_as_a_prefix_too(learner_of, llama):
    learner = learner_of(False, PatientLearner, model={**llama, "decoder_dtype": "bfloat16"})
    whole = held(learner)
    require_equal_with_and_without(learner)
    assert held(learner) < whole


def test_adapters_that_a_method_has_switched_for_a_pass_are_switched_in_the_second(learner_of):
    learner = learner_of(False, exchange=("*crossattention*weight",))
    losses = learner.training_losses

    def without_adapters(*given):
        with learner.model.disable_adapter():
            return losses(*given)

    learner.training_losses = without_adapters
    require_equal_with_and_without(learner)


def test_memory_that_runs_out_in_the_recomputation_is_answered_by_halves(learner_of):
    learner = learner_of(False, PatientLearner)
    expected = one_pass(learner)
    sizes, most = [], 2

    def limited(module, args):
        if torch._C._current_graph_task_id() >= 0:
            sizes.append(len(args[0]))
            if len(args[0]) > most:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    learner.generator.decoder.transformer.h[0].ln_2.register_forward_pre_hook(limited)
    torch.testing.assert_close(one_pass(recomputing(learner)), expected, rtol=1e-3, atol=1e-5)
    assert sizes[:3] == [ROWS, 2, 2] and max(sizes[1:]) == 2
    most = 0
    with pytest.raises(DataError, match="does not hold one report"):
        one_pass(learner)


def test_a_decoder_that_cannot_is_refused_at_construction(learner_of, monkeypatch):
    from transformers import GPT2LMHeadModel

    monkeypatch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)
    learner_of(False)
    with pytest.raises(ConfigError, match=r"training\.gradient_checkpointing: .*set it to false"):
        learner_of(True)
