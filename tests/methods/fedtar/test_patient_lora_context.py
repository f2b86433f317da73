"""The patient part's context, precision, state and construction, mostly on one layer."""

import pytest
import torch
from adapted_models import (
    GPT2_TARGETS,
    One,
    adapted,
    gpt2_model,
    normal,
    one_layer,
    patients,
    shake,
    written_out_weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import shared_parameters


@settings(max_examples=30, deadline=None)
@given(
    samples=st.integers(1, 4),
    group=st.integers(1, 3),
    middle=st.lists(st.integers(1, 3), max_size=2),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    rank=st.integers(1, 3),
)
def test_rows_of_any_shape_belong_to_samples_in_adjacent_groups(samples, group, middle, sizes, rank):
    peft_model, patient = one_layer(*sizes, rank=rank)
    x = normal(samples * group, *middle, sizes[0], seed=9)
    q, steps = patients(samples)
    with torch.no_grad(), patient.adapt(q, steps):
        y = peft_model(x)
    base = peft_model.get_base_model().layer.base_layer
    for row in range(samples * group):
        p = row // group
        weights = written_out_weights(nn.ModuleDict({"layer": base}), peft_model, patient, q[p], steps[p])
        torch.testing.assert_close(
            y[row], nn.functional.linear(x[row], weights["layer.weight"], base.bias), rtol=1e-10, atol=1e-10
        )


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
    peft_model, patient = adapted(One(32, 16), ["layer"])
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


def test_the_state_holds_nothing_shared():
    peft_model, patient = adapted(gpt2_model().double().eval(), GPT2_TARGETS)
    maps = [f"{name}.{part}" for name in ("hypernetworks", "projection") for part in ("bias", "weight")]
    assert sorted(patient.state_dict()) == [*maps, "time_embedding"]
    assert not any("hypernetwork" in name for name in peft_model.state_dict())


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
