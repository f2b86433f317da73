"""The two adapters: what each model computes and which half moves what; what travels of the paper's models."""

import json

import pytest
import torch
from adapted_models import GPT2_TARGETS, gpt2_case, shake
from torch import nn

from fedtar_flare.methods.fedmrg.dual_adapter import (
    BROADCAST,
    GENERIC,
    SPECIALISED,
    add_specialised,
    copy_broadcast,
    generic_model,
    mixed_model,
    specialised_model,
)
from fedtar_flare.models.adapters.lora import add_lora, load_shared_state, shared_parameters, shared_state
from fedtar_flare.models.outline import outline
from fedtar_flare.runtime.recipe import MethodRecipe

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


LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def test_what_travels_is_the_paper_s_59_million_values(tmp_path):
    """4.7 TB for 10 sites over 1,000 rounds both ways, as the paper's communication cost; the bank apart."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    model = {"decoder_name": str(tmp_path), "tokenizer": "small", "weights": "random"}
    executor = MethodRecipe("fedmrg", preset="fedmrg-paper", model=model).executor
    made_of = outline(executor.strategy.settings.model, executor.strategy.extend)
    factors = made_of.lora_values(executor.strategy.settings.model.lora_targets, executor.strategy.settings.lora.rank)
    whole = made_of.exchanged(executor.strategy.settings.lora.exchange)
    values = dict.fromkeys(("encoder", "projection", "diagnosis"), 0)
    for name in whole:
        values[name.partition(".")[0]] += made_of.tensors[name]
    assert factors == 2 * 32 * 16 * (4096 + 4096) == 8_388_608
    assert values == {"encoder": 42_500_160 - 9_408, "projection": 8_388_608, "diagnosis": 56 * 2049 + 4 * 4096}
    total = factors + sum(values.values())
    assert total == 59_399_096 and round(4 * total / 1e6) == 238
    assert round(2 * 10 * 1000 * 4 * total / 1e12, 1) == 4.8
    assert not [name for name in whole if name in made_of.barred], "neither pixels nor words one by one"

    layers = made_of.targeted(executor.strategy.settings.model.lora_targets)
    assert len(layers) == 64 and {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"}
    assert executor.strategy.settings.lora.alpha / executor.strategy.settings.lora.rank == 1.0
