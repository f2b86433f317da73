"""The two adapters: what each model computes, which half moves what, and what PEFT loads of it."""

import pytest
import torch
from adapted_models import GPT2_TARGETS, gpt2_case, shake
from torch import nn

from fedtar_flare.core.settings import matches
from fedtar_flare.methods.fedmrg.dual_adapter import (
    BROADCAST,
    GENERIC,
    SPECIALISED,
    add_specialised,
    copy_broadcast,
    decoder_targets,
    generic_model,
    mixed_model,
    specialised_model,
)
from fedtar_flare.models.adapters.lora import add_lora, load_shared_state, shared_parameters, shared_state
from fedtar_flare.testing import executor_of

SCALE = 3.0


class Wrapped(nn.Module):
    """A model whose decoder is GPT-2, beside an encoder of one linear layer."""

    def __init__(self, decoder):
        super().__init__()
        self.encoder = nn.ModuleDict({"c_fc": nn.Linear(5, 5).double()})
        self.decoder = decoder


@pytest.fixture
def adapted():
    """A PEFT model with all three sets moved, and a forward pass of its decoder."""
    case = gpt2_case()
    targets = (*GPT2_TARGETS, "!decoder.lm_head")
    model = add_lora(Wrapped(case.model.double().eval()), targets=targets, rank=2, alpha=6, seed=0, adapter=GENERIC)
    add_specialised(model, targets, seed=1)
    shake(model)
    load_shared_state(model, shared_state(model, GENERIC), GENERIC)  # what travels is float32
    copy_broadcast(model)
    run = lambda: case.outputs(model.get_base_model().decoder, case.inputs)  # noqa: E731
    return model, run


def written_out(model, run, parts):
    """The decoder with ``W + s * sum of weight * (B A)`` written into its layers."""
    base = model.get_base_model()
    saved = {}
    with torch.no_grad():
        for name, layer in base.named_modules():
            if not hasattr(layer, "lora_A") or not name.startswith("decoder."):
                continue
            weight = layer.base_layer.weight
            saved[name] = weight.clone()
            for adapter, share in parts.items():
                delta = SCALE * share * layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight
                weight += delta if isinstance(layer.base_layer, nn.Linear) else delta.T
        model.disable_adapter_layers()
        result = run()
        model.enable_adapter_layers()
        for name, weight in saved.items():
            base.get_submodule(name).base_layer.weight.copy_(weight)
    return result


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_every_model_is_its_formula(adapted, mix):
    model, run = adapted
    shares = {
        generic_model(model): {GENERIC: 1},
        specialised_model(model): {BROADCAST: 1, SPECIALISED: 1},
        mixed_model(model, mix): {GENERIC: 1, SPECIALISED: 1 - mix},
    }
    for context, parts in shares.items():
        with context, torch.no_grad():
            result = run()
        torch.testing.assert_close(result, written_out(model, run, parts), rtol=0, atol=1e-9)


def test_only_the_decoder_has_the_other_sets_and_the_broadcast_is_a_copy_that_nothing_trains(adapted):
    model, _ = adapted
    names = {adapter: list(shared_parameters(model, adapter)) for adapter in (GENERIC, BROADCAST, SPECIALISED)}
    assert any(".encoder." in name for name in names[GENERIC])
    assert not any(".encoder." in name for adapter in (BROADCAST, SPECIALISED) for name in names[adapter])
    generic, broadcast = shared_state(model, GENERIC), shared_state(model, BROADCAST)
    assert all(torch.equal(v, generic[name.replace(BROADCAST, GENERIC)]) for name, v in broadcast.items())
    assert not any(p.requires_grad for p in shared_parameters(model, BROADCAST).values())
    assert all(p.requires_grad for a in (GENERIC, SPECIALISED) for p in shared_parameters(model, a).values())


def test_only_the_decoder_is_targeted_unless_the_encoder_has_lora_too():
    targets = ("encoder.*.dense", "*.c_fc")
    narrow = decoder_targets(targets)
    assert narrow == decoder_targets(narrow)
    for backbone, held in (("whole", narrow), ("frozen", narrow), ("lora", targets)):
        settings = {"model": {"lora_targets": targets}, "fedmrg": {"backbone": backbone, "labeler": "none"}}
        assert executor_of("fedmrg", "tiny", **settings).strategy.settings.model.lora_targets == held
    names = ("decoder.h.0.c_fc", "encoder.x.dense", "encoder.x.c_fc")
    assert [matches(name, narrow) for name in names] == [True, False, False]
