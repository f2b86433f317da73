"""The shared LoRA: what is trained, what travels under which name, and adapter folders that PEFT loads."""

import copy
import json
import re
import warnings

import pytest
import torch
from adapted_models import shake
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save
from torch import nn

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.settings import matches
from fedtar_flare.models.adapters.lora import (
    active_adapters,
    adapter_config,
    add_lora,
    load_shared_state,
    lora_layers,
    shared_parameters,
    shared_state,
)
from fedtar_flare.models.adapters.peft_file import adapter_of, read_adapter, write_adapter
from fedtar_flare.models.config import DECODER_TARGETS
from fedtar_flare.protocol.contract import LORA_NAMES

TARGETS = ("encoder.mix", *DECODER_TARGETS)
CROSS_ATTENTION = "decoder.*.crossattention.*"
NAME = "base_model.model.encoder.mix.lora_A.weight"
X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))


class Generator(nn.Module):
    """nn.Linear, Conv1D and tied weights in one plain module."""

    def __init__(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.encoder = nn.ModuleDict({"mix": nn.Linear(6, 8), "keep": nn.Linear(8, 8)})
        sizes = {"vocab_size": 13, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        self.decoder = GPT2LMHeadModel(GPT2Config(**sizes, add_cross_attention=True, bos_token_id=0))

    def forward(self, x):
        memory = self.encoder["keep"](self.encoder["mix"](x))
        ids = torch.zeros(len(x), 4, dtype=torch.long)
        return self.decoder(input_ids=ids, encoder_hidden_states=memory).logits


@pytest.fixture
def base():
    torch.manual_seed(0)
    return Generator().eval()


def shared(base, **changes):
    return add_lora(copy.deepcopy(base), **{"targets": TARGETS, "rank": 2, "alpha": 8, "seed": 3, **changes})


def save_adapter(peft_model, folder, adapter="default"):
    write_adapter(folder, shared_state(peft_model, adapter), adapter_config(peft_model, adapter))


def test_the_model_starts_unchanged_and_only_factors_are_trained(base):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Conv1D beside nn.Linear must not make PEFT warn
        peft_model = shared(base)
    assert torch.equal(peft_model(X), base(X))
    trained = [name for name, parameter in peft_model.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert len(shared_parameters(peft_model)) == len(trained) == 2 * (1 + 4 + 3)
    layer = peft_model.get_base_model().encoder["mix"]
    assert layer.scaling == {"default": 4.0}
    assert layer.lora_A["default"].weight.abs().max() <= 1 / 6**0.5  # Kaiming uniform bound of 6 inputs


def test_the_seed_alone_makes_the_factors_and_the_global_generator_is_left_alone(base):
    states = []
    for noise, seed in ((0, 3), (1, 3), (0, 4)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        states.append(shared_state(shared(base, seed=seed)))
        assert torch.equal(torch.get_rng_state(), before)
    first, same, other = states
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == name.endswith("lora_B.weight") for name in first)


def test_extras_travel_whole_under_their_first_base_model_names(base):
    peft_model = shared(base, extra=[CROSS_ATTENTION, "encoder.keep.weight", "decoder.lm_head.weight"])
    names = [name for name in shared_parameters(peft_model) if "lora_" not in name]
    cross = "decoder.transformer.h.0.crossattention."
    parts = [f"{cross}{layer}.{leaf}" for layer in ("c_attn", "c_proj", "q_attn") for leaf in ("bias", "weight")]
    tied = "decoder.transformer.wte.weight"  # the first name of lm_head's weight
    assert names == sorted([*parts, tied, "encoder.keep.weight"])
    assert all(parameter.requires_grad for parameter in shared_parameters(peft_model).values())
    peft_model(X).square().sum().backward()
    assert peft_model.get_base_model().encoder["keep"].weight.grad.abs().max() > 0
    assert peft_model.get_base_model().encoder["keep"].bias.grad is None


def test_values_are_float32_copies_that_are_loaded_into_the_same_parameters(base):
    source, target = (shared(base.double(), extra=[CROSS_ATTENTION], seed=seed) for seed in (1, 2))
    shake(source)
    before, state = shared_parameters(target), shared_state(source)
    load_shared_state(target, state)
    for name, parameter in shared_parameters(target).items():
        assert parameter is before[name] and parameter.dtype == torch.float64 and parameter.requires_grad
        assert state[name].dtype == torch.float32 and torch.equal(parameter.float(), state[name])
        assert state[name].data_ptr() != parameter.data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NAME: None}, f"lacks tensor {NAME}"),
        ({"other": torch.zeros(1)}, "adds tensor other"),
        ({NAME: torch.zeros(3, 6)}, rf"{NAME} has shape \(3, 6\), this model's \(2, 6\)"),
        ({NAME: torch.zeros(2, 6, dtype=torch.int32)}, f"{NAME} is torch.int32"),
        ({NAME: [0.0]}, f"{NAME} is list"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_tensor_and_changes_nothing(base, change, message):
    peft_model = shared(base)
    before = shared_state(peft_model)
    state = {name: tensor + 1 for name, tensor in before.items()} | change
    with pytest.raises(ExchangeError, match=message):
        load_shared_state(peft_model, {name: tensor for name, tensor in state.items() if tensor is not None})
    assert all(torch.equal(tensor, before[name]) for name, tensor in shared_state(peft_model).items())


def from_pretrained(base, folder):
    model = copy.deepcopy(base)
    if (folder / "extra.safetensors").exists():
        model.load_state_dict(load_file(folder / "extra.safetensors"), strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT only warns about missing tensors
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        return PeftModel.from_pretrained(model, folder).eval()


@pytest.mark.parametrize("extra", [(), (CROSS_ATTENTION,)])
def test_peft_loads_a_saved_adapter_with_the_same_outputs(base, tmp_path, extra):
    save_adapter(shared(base, extra=[CROSS_ATTENTION], seed=8), tmp_path)  # an earlier adapter is replaced whole
    peft_model = shared(base, extra=extra).eval()
    shake(peft_model)
    save_adapter(peft_model, tmp_path)
    loaded = from_pretrained(base, tmp_path)
    assert torch.equal(loaded(X), peft_model(X)) and not torch.allclose(loaded(X), base(X), atol=1e-3)
    files = ["adapter_config.json", "adapter_model.safetensors"] + ["extra.safetensors"] * bool(extra)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    again = shared(base, extra=extra, seed=9).eval()
    load_shared_state(again, read_adapter(tmp_path))
    assert torch.equal(again(X), peft_model(X))


def test_the_files_are_those_that_peft_writes_without_the_base_models_path(base, tmp_path):
    peft_model = shared(base)
    shake(peft_model)
    peft_model.save_pretrained(tmp_path / "pefts")
    peft_model.peft_config["default"].base_model_name_or_path = "/hospital/models/base"
    save_adapter(peft_model, tmp_path / "ours")
    ours, pefts = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("ours", "pefts"))
    assert ours.keys() == pefts.keys() and all(torch.equal(ours[name], pefts[name]) for name in ours)
    ours, pefts = (json.loads((tmp_path / kind / "adapter_config.json").read_text()) for kind in ("ours", "pefts"))
    pefts["target_modules"].sort()
    assert ours == {name: pefts[name] for name in ours} == adapter_config(peft_model)
    left_out = {name: value for name, value in pefts.items() if name not in ours and name != "peft_version"}
    usual = LoraConfig().to_dict() | {"auto_mapping": left_out["auto_mapping"]}  # the name of a class to import
    assert left_out == {name: usual[name] for name in left_out}
    assert ours["r"] == 2 and ours["lora_alpha"] == 8 and ours["target_modules"] == list(lora_layers(peft_model))
    assert peft_model.peft_config["default"].inference_mode is False


@pytest.mark.parametrize(
    "content, words",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"", "not readable as safetensors"),
        (save({"base_model.model.a.lora_A.weight": torch.tensor([[1.0, float("nan")]])}), "values that are no number"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content, words):
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_adapter(tmp_path)


SPECIAL = ("encoder.keep", "decoder.*.c_fc")


def dual(base):
    """``generic`` on all targets, ``special`` on the decoder and a layer that the first set leaves alone."""
    peft_model = shared(base, adapter="generic", extra=["encoder.keep.bias"]).eval()
    add_lora(peft_model, targets=SPECIAL, rank=3, alpha=3, seed=7, adapter="special")
    shake(peft_model)
    return peft_model


def test_named_sets_travel_under_their_names_and_the_default_one_under_none(base):
    peft_model = dual(base)
    generic, special = (shared_parameters(peft_model, name) for name in ("generic", "special"))
    assert {adapter_of(name) for name in generic} == {"generic", None} and "encoder.keep.bias" in generic
    assert {adapter_of(name) for name in special} == {"special"} and not generic.keys() & special.keys()
    assert "base_model.model.encoder.mix.lora_A.generic.weight" in generic
    assert all(adapter_of(name) == "default" for name in shared_parameters(shared(base)))
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in [*generic, *special])
    assert not any(matches(name, [LORA_NAMES]) for name in special), "a contract must name what travels"
    before = shared_state(peft_model, "special")
    load_shared_state(peft_model, {n: v + 1 for n, v in shared_state(peft_model, "generic").items()}, "generic")
    assert all(torch.equal(value, before[name]) for name, value in shared_state(peft_model, "special").items())
    with pytest.raises(ExchangeError, match=r"lacks tensor .*generic"):
        load_shared_state(peft_model, before, "generic")


def test_a_further_set_alone_is_trained_where_the_first_is_frozen_and_does_not_act_by_itself(base):
    peft_model = shared(base, adapter="generic").eval().requires_grad_(False)
    before = peft_model(X)
    add_lora(peft_model, targets=SPECIAL, rank=3, seed=7, adapter="special")
    trained = {name for name, parameter in peft_model.named_parameters() if parameter.requires_grad}
    assert trained and all(".special." in name for name in trained), "what was frozen stays frozen"
    shake(peft_model)
    assert torch.equal(peft_model(X), before)


def test_the_sets_that_act_are_chosen_per_layer_and_what_is_trained_stays(base):
    peft_model = dual(base)
    decoder = peft_model.get_base_model().decoder
    layer, keep = decoder.transformer.h[0].mlp.c_fc, peft_model.get_base_model().encoder["keep"]
    flags = {name: parameter.requires_grad for name, parameter in peft_model.named_parameters()}
    x = torch.randn(5, 8, requires_grad=True)
    low = {name: layer.scaling[name] * layer.lora_B[name](layer.lora_A[name](x)) for name in ("generic", "special")}
    plain, encoded = layer.base_layer(x), keep(x)
    for adapters in ([], ["generic"], ["special"], ["special", "generic"]):
        with active_adapters(peft_model, adapters, "decoder.*"):
            torch.testing.assert_close(layer(x), plain + sum(low[name] for name in adapters))
            assert torch.equal(keep(x), encoded), "only the layers that were named are switched"
            assert {name: parameter.requires_grad for name, parameter in peft_model.named_parameters()} == flags
            peft_model.zero_grad()
            layer(x).square().sum().backward()
            moved = {name for name in low if layer.lora_A[name].weight.grad is not None}
            assert moved == set(adapters)
    with pytest.raises(RuntimeError), active_adapters(peft_model, ["special"]):
        raise RuntimeError
    for unknown in ((["default"], "*"), (["special"], "nothing")):
        with pytest.raises(ConfigError, match=f"{unknown[0][0]}|nothing"), active_adapters(peft_model, *unknown):
            pass
    torch.testing.assert_close(layer(x), plain + low["generic"])


def test_each_set_is_saved_as_a_folder_that_peft_loads(base, tmp_path):
    peft_model = dual(base)
    for name, rank in (("generic", 2), ("special", 3)):
        save_adapter(peft_model, tmp_path / name, name)
        with active_adapters(peft_model, [name]):
            expected = peft_model(X)
        extra = load_file(tmp_path / "generic" / "extra.safetensors")  # the model's, whichever set acts
        base.load_state_dict(extra, strict=False)
        assert torch.equal(from_pretrained(base, tmp_path / name)(X), expected)
        loaded = read_adapter(tmp_path / name, name)
        assert all(torch.equal(value, loaded[key]) for key, value in shared_state(peft_model, name).items())
        assert adapter_config(peft_model, name)["r"] == rank


@pytest.mark.parametrize(
    ("further", "changes", "message"),
    [
        (False, {"targets": ["nothing"]}, "match no module of Generator"),
        (False, {"targets": ["decoder.transformer.wte"]}, "module 'decoder.transformer.wte' of type Embedding"),
        (False, {"targets": ["*"]}, "of type Generator"),
        (False, {"targets": [r"decoder\..*\.c_fc"]}, "not of regular expressions: write 'decoder.\\*.c_fc'"),
        (False, {"targets": "encoder.mix"}, "a list of"),
        (False, {"extra": ["nothing"]}, "extra 'nothing' matches no parameter"),
        (True, {"adapter": "generic"}, "adapter of this name"),
        (True, {"adapter": "second", "extra": ["encoder"]}, "first adapter"),
        *((True, {"adapter": name}, "lower-case") for name in ("Second", "a.b", "lora")),
        (True, {"adapter": "second", "targets": ["nothing"]}, "match no module"),
        (True, {"adapter": "second", "targets": ["encoder.mix.base_layer"]}, "match no module"),
    ],
)
def test_a_set_that_cannot_be_is_refused_by_name(base, further, changes, message):
    model = dual(base) if further else base
    with pytest.raises(ConfigError, match=message):
        add_lora(model, **{"targets": TARGETS, "seed": 0, **changes})


def test_a_layer_whose_weight_is_used_without_calling_it_is_refused():
    with pytest.raises(ConfigError, match="type NonDynamicallyQuantizableLinear"):
        add_lora(nn.MultiheadAttention(4, 2), targets=["out_proj"], seed=0)
