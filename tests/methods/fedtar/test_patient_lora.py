"""Per-sample LoRA against a loop that writes each patient's weights out; its context, precision and construction."""

import copy

import pytest
import torch
from adapted_models import BATCH, CASES, adapted, normal, one, one_layer, patients, shake, written_out_weights
from torch import nn
from torch.func import functional_call

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import shared_parameters

FORMS = [(name, {"time_conditioned": given}) for name in CASES for given in (True, False)]


def shaken(case, **form):
    """The adapted model and its patient part, off their starts."""
    made = adapted(copy.deepcopy(case.model).double().eval(), case.targets, **form)
    for part in made:
        shake(part)
    return made


def run(case, device="cpu", **form):
    """The adapted model and its patient part, its outputs, what is trained, and the gradient of a weighted sum."""
    peft_model, patient = (part.to(device) for part in shaken(case, **form))
    with patient.adapt(*patients()):
        inputs = {name: value.to(device) for name, value in case.inputs.items()}
        outputs = case.outputs(peft_model.get_base_model(), inputs)
    parameters = [*shared_parameters(peft_model).values(), *patient.parameters()]
    gradients = torch.autograd.grad((outputs * weighting(outputs)).sum(), parameters)
    return peft_model, patient, outputs, parameters, gradients


def weighting(outputs):
    return normal(*outputs.shape, seed=7).to(outputs.device)


@pytest.mark.parametrize(("name", "form"), [*FORMS, ("gpt2", {"constant_q": True})])
def test_outputs_and_gradients_equal_a_loop_over_written_out_weights(name, form):
    case, (q, steps) = CASES[name](), patients()
    peft_model, patient, outputs, parameters, gradients = run(case, **form)
    base, rows = case.model.double().eval(), []
    for p in range(BATCH):
        weights = written_out_weights(base, peft_model, patient, q[p], steps[p])
        call = lambda weights=weights, **inputs: functional_call(base, weights, kwargs=inputs)  # noqa: E731
        rows.append(case.outputs(call, case.of_sample(p)))
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
    (*_, outputs, _, gradients), (*_, on_gpu, _, theirs) = (run(CASES["gpt2"](), device) for device in ("cpu", "cuda"))
    for a, b in zip((outputs, *gradients), (on_gpu, *theirs), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-9, atol=1e-9)


def test_phi_starts_near_one_vector_that_all_patients_share_and_the_papers_form_far_apart():
    q = torch.eye(5, dtype=torch.float64)
    for changes, length, distance in (({}, 1.0, 0.1), ({"common_start": False}, 0.0, 1.0)):
        _, patient = adapted(one(6, 4).double(), ["layer"], embedding_dim=512, **changes)
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
    peft_model, patient = shaken(case := CASES["gpt2"]())

    def rows(*acts):
        with patient.adapt(*patients(), *acts):
            return case.outputs(peft_model.get_base_model(), case.inputs).unflatten(0, (BATCH, -1))

    shared = case.outputs(peft_model.get_base_model(), case.inputs).unflatten(0, (BATCH, -1))
    mixed, personal = rows(torch.tensor([1, 0, 1])), rows()
    torch.testing.assert_close(mixed[1], shared[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mixed[[0, 2]], personal[[0, 2]], rtol=1e-12, atol=1e-12)
    none = torch.autograd.grad(rows(torch.zeros(BATCH)).sum(), list(patient.parameters()))
    assert not any(gradient.any() for gradient in none)


def test_rows_that_do_not_divide_into_samples_are_refused_by_layer_name():
    peft_model, patient = one_layer()
    with patient.adapt(*patients(2)):
        for shape in ((3, 4, 6), (1, 6), (6,)):
            with pytest.raises(DataError, match=r"layer layer: .*\b2 samples"):
                peft_model(normal(*shape))


def test_layers_are_given_back_after_an_exception_and_contexts_nest():
    peft_model, patient = one_layer()
    layer = peft_model.get_base_model().layer
    x = normal(2, 6)
    shared = peft_model(x)
    q, steps = patients(2)
    with pytest.raises(KeyError), patient.adapt(q, steps):
        raise KeyError
    assert "forward" not in layer.__dict__ and torch.equal(peft_model(x), shared)

    with patient.adapt(q, steps):
        outer = peft_model(x)
        with pytest.raises(KeyError), patient.adapt(q.flip(0), steps.flip(0)):
            assert not torch.allclose(peft_model(x), outer)
            raise KeyError
        assert torch.equal(peft_model(x), outer)
    assert "forward" not in layer.__dict__ and torch.equal(peft_model(x), shared)


def test_gradients_flow_where_the_context_was_opened_without_them():
    peft_model, patient = one_layer()
    x, (q, steps) = normal(2, 6), patients(2)
    with torch.no_grad(), patient.adapt(q, steps):
        quiet = peft_model(x)
        with torch.enable_grad():
            peft_model(x).sum().backward()
    assert torch.isfinite(quiet).all() and patient.projection.weight.grad.abs().max() > 0


def test_bfloat16_autocast_is_close_to_float32_and_keeps_float32_gradients():
    peft_model, patient = adapted(one(32, 16), ["layer"])
    shake(peft_model)
    shake(patient)
    x, (q, steps) = normal(4, 10, 32).float(), patients(2)
    with patient.adapt(q.float(), steps):
        full = peft_model(x)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), patient.adapt(q, steps):
            with torch.autocast("cpu", torch.bfloat16):
                half = peft_model(x)
            assert half.dtype == torch.bfloat16
            torch.testing.assert_close(half.float(), full, rtol=0.03, atol=0.03 * float(full.detach().abs().max()))
            torch.testing.assert_close(peft_model(x), full)  # the same context outside of autocast
            if grad:
                half.float().sum().backward()
    for parameter in [*shared_parameters(peft_model).values(), *patient.parameters()]:
        assert parameter.grad.dtype == torch.float32 and torch.isfinite(parameter.grad).all()


def test_models_that_the_pass_cannot_adapt_are_refused_by_layer():
    from peft import LoraConfig, get_peft_model

    for layer, changes, message in (
        (nn.Linear(4, 4), {"lora_dropout": 0.1}, "layer 0 has LoRA with dropout"),
        (nn.Linear(4, 4), {"use_dora": True}, "layer 0 has LoRA with dropout, bias or a variant"),
        (nn.Linear(4, 4), {"lora_bias": True}, "layer 0 has LoRA with dropout, bias or a variant"),
        (nn.Conv2d(4, 4, 1), {}, "layer 0 is .*Conv2d"),
    ):
        peft_model = get_peft_model(nn.Sequential(layer), LoraConfig(target_modules=["0"], **changes))
        with pytest.raises(ConfigError, match=message):
            PatientLoRA(peft_model, PatientConfig(), time_steps=3, seed=0)
    peft_model, patient = one_layer()
    peft_model.merge_adapter()
    with pytest.raises(ConfigError, match="layer layer: the shared LoRA is merged"), patient.adapt(*patients(2)):
        raise AssertionError("must not be entered")
    peft_model.unmerge_adapter()
    with patient.adapt(*patients(2)):
        peft_model(normal(2, 6))
