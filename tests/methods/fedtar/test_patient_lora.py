"""Per-sample LoRA against a loop that writes each patient's weights out, on every kind of backbone."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from adapted_models import (
    BATCH,
    CASES,
    GPT2_TARGETS,
    PAD,
    adapted,
    gpt2_case,
    gpt2_model,
    normal,
    patients,
    shake,
    written_out_weights,
)
from torch.func import functional_call

from fedtar_flare.models.adapters.lora import shared_parameters


def called_with(base, weights, **inputs):
    return functional_call(base, weights, kwargs=inputs)


FORMS: list[dict[str, Any]] = [{"time_conditioned": True}, {"time_conditioned": False}]


def run(case, device="cpu", **form):
    """The adapted model and its patient part, its outputs, what is trained, and the gradient of a weighted sum."""
    peft_model, patient = adapted(copy.deepcopy(case.model).double().eval(), case.targets, **form)
    shake(peft_model)
    shake(patient)
    peft_model.to(device)
    patient.to(device)
    with patient.adapt(*patients()):
        inputs = {name: value.to(device) for name, value in case.inputs.items()}
        outputs = case.outputs(peft_model.get_base_model(), inputs)
    parameters = [*shared_parameters(peft_model).values(), *patient.parameters()]
    gradients = torch.autograd.grad((outputs * weighting(outputs)).sum(), parameters)
    return peft_model, patient, outputs, parameters, gradients


def weighting(outputs):
    return normal(*outputs.shape, seed=7).to(outputs.device)


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in CASES for form in FORMS] + [(next(iter(CASES)), {"constant_q": True})]
)
def test_outputs_and_gradients_equal_a_loop_over_written_out_weights(name, form):
    case, (q, steps) = CASES[name](), patients()
    peft_model, patient, outputs, parameters, gradients = run(case, **form)
    base, rows = case.model.double().eval(), []
    for p in range(BATCH):
        weights = written_out_weights(base, peft_model, patient, q[p], steps[p])
        rows.append(case.outputs(partial(called_with, base, weights), case.of_sample(p)))
    reference = torch.cat(rows)
    expected = torch.autograd.grad((reference * weighting(reference)).sum(), parameters)
    torch.testing.assert_close(outputs, reference, rtol=1e-9, atol=1e-9)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-9 * float(wanted.abs().max()))


@pytest.mark.gpu
def test_a_gpu_gives_the_cpus_outputs_and_gradients():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = gpt2_case()
    (*_, outputs, _, gradients), (*_, on_gpu, _, theirs) = (run(case, device) for device in ("cpu", "cuda"))
    for a, b in zip((outputs, *gradients), (on_gpu, *theirs), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-9, atol=1e-9)


def test_phi_starts_near_one_vector_that_all_patients_share_and_the_papers_form_far_apart():
    q = torch.eye(5, dtype=torch.float64)
    for settings, length, distance in (({}, 1.0, 0.1), ({"common_start": False}, 0.0, 1.0)):
        case = next(iter(CASES.values()))()
        _, patient = adapted(case.model.double(), case.targets, embedding_dim=512, **settings)
        phi = patient.embed(q, torch.ones(5, dtype=torch.long))
        assert float(patient.projection.bias.norm()) == pytest.approx(length, abs=1e-6)
        assert (phi - patient.projection.bias).norm(dim=1).tolist() == pytest.approx([distance] * 5, rel=0.1)


@pytest.mark.parametrize("name", CASES)
def test_the_start_equals_the_shared_model_and_outside_pefts_own_forward_runs(name):
    case = CASES[name]()
    peft_model, patient = adapted(case.model.double().eval(), case.targets)
    shake(peft_model)

    def run():
        return case.outputs(peft_model.get_base_model(), case.inputs).detach()

    shared = run()
    with patient.adapt(*patients()):
        torch.testing.assert_close(run(), shared, rtol=1e-12, atol=1e-12)
    shake(patient)
    with patient.adapt(*patients()):
        assert not torch.allclose(run(), shared, atol=1e-3)
    assert torch.equal(run(), shared)
    with peft_model.disable_adapter():
        plain = run()
        with patient.adapt(*patients()):
            assert torch.equal(run(), plain)
    assert not torch.allclose(plain, shared, atol=1e-3)


def test_a_patient_whose_adapter_does_not_act_has_the_shared_part_alone():
    case = gpt2_case()
    peft_model, patient = adapted(case.model.double().eval(), case.targets)
    shake(peft_model)
    shake(patient)

    def rows(*acts):
        with patient.adapt(*patients(), *acts):
            return case.outputs(peft_model.get_base_model(), case.inputs).unflatten(0, (BATCH, -1))

    shared = case.outputs(peft_model.get_base_model(), case.inputs).unflatten(0, (BATCH, -1))
    mixed, personal = rows(torch.tensor([1, 0, 1])), rows()
    torch.testing.assert_close(mixed[1], shared[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mixed[[0, 2]], personal[[0, 2]], rtol=1e-12, atol=1e-12)
    none = torch.autograd.grad(rows(torch.zeros(BATCH)).sum(), list(patient.parameters()))
    assert not any(gradient.any() for gradient in none)


def test_beam_search_of_a_batch_equals_one_at_a_time_and_makes_factors_once():
    peft_model, patient = adapted(gpt2_model().double().eval(), GPT2_TARGETS)
    shake(peft_model, 0.3)
    shake(patient, 0.3)
    calls = []
    patient.hypernetworks.register_forward_hook(lambda module, *_: calls.append(module))
    memory, (q, steps) = normal(BATCH, 5, 16), patients()

    def write(chosen, q=q):
        start = torch.zeros(len(chosen), 1, dtype=torch.long)
        with torch.no_grad(), patient.adapt(q[chosen], steps[chosen]):
            inputs = {"attention_mask": torch.ones_like(start), "encoder_hidden_states": memory[chosen]}
            search = {"num_beams": 3, "max_length": 12, "do_sample": False}
            rows = peft_model.get_base_model().generate(input_ids=start, **inputs, **search)
        return [[token for token in row if token != PAD] for row in rows.tolist()]

    together = write([0, 1, 2])
    assert len(calls) == 1
    assert together == [write([p])[0] for p in range(BATCH)]
    assert len({tuple(row) for row in together}) == BATCH
    assert together != write([0, 1, 2], q[[1, 2, 0]])
