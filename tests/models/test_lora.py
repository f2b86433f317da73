"""Adapters of every kind: their formulas, what is trained and travels, and folders that PEFT loads."""

import copy
import warnings

import pytest
import torch
from adapted_models import GPT2_TARGETS, gpt2_case, shake
from peft import PeftModel
from safetensors.torch import load_file, save
from tables import cases
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.models.adapters.kinds import add_adapter, add_like, replace_conv1d
from fedtar_flare.models.adapters.lora import (
    active_adapters,
    adapter_config,
    add_lora,
    load_shared_state,
    shared_parameters,
    shared_state,
)
from fedtar_flare.models.adapters.peft_file import adapter_of, read_adapter, write_adapter
from fedtar_flare.models.config import DECODER_TARGETS

TARGETS = ("encoder.mix", *DECODER_TARGETS)
CROSS_ATTENTION = "decoder.*.crossattention.*"
NAME = "base_model.model.encoder.mix.lora_A.weight"
X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))


class Generator(nn.Module):
    """nn.Linear, Conv1D and tied weights in one plain module."""

    def __init__(self):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [({NAME: None}, f"lacks tensor {NAME}"), ({"other": torch.zeros(1)}, "adds tensor other"),
     ({NAME: torch.zeros(3, 6)}, rf"{NAME} has shape \(3, 6\), this model's \(2, 6\)"),
     ({NAME: torch.zeros(2, 6).int()}, f"{NAME} is torch.int32"), ({NAME: [0.0]}, f"{NAME} is list")],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_by_tensor_and_changes_nothing(base, change, message):
    peft_model = shared(base)
    before = shared_state(peft_model)
    state = {name: tensor + 1 for name, tensor in before.items()} | change
    with pytest.raises(ExchangeError, match=message):
        load_shared_state(peft_model, {name: tensor for name, tensor in state.items() if tensor is not None})
    assert all(torch.equal(tensor, before[name]) for name, tensor in shared_state(peft_model).items())


@pytest.mark.parametrize(
    "content, words",
    [(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
     (b"", "not readable as safetensors"), (save({NAME: torch.tensor([[float("nan")]])}), "values that are no number")],
)  # fmt: skip
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


@pytest.mark.parametrize(("further", "changes", "message"), cases(__file__, "refusals.yaml")["sets"])
def test_a_set_that_cannot_be_is_refused_by_name(base, further, changes, message):
    model = dual(base) if further else base
    with pytest.raises(ConfigError, match=message):
        add_lora(model, **{"targets": TARGETS, "seed": 0, **changes})


def test_a_layer_whose_weight_is_used_without_calling_it_is_refused():
    with pytest.raises(ConfigError, match="type NonDynamicallyQuantizableLinear"):
        add_lora(nn.MultiheadAttention(4, 2), targets=["out_proj"], seed=0)


RANK, ALPHA = 4, 8.0
KINDS = ("lora", "adalora", "vera", "loha")


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    case = gpt2_case()
    case.model.double().eval()
    return case


def adapted(case, kind, seed=3, **more):
    model, settings = copy.deepcopy(case.model), {"targets": GPT2_TARGETS, "rank": RANK, "alpha": ALPHA, "seed": seed}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Conv1D beside nn.Linear must not make PEFT warn
        made = add_lora(model, **settings, **more) if kind == "lora" else add_adapter(model, kind, **settings, **more)
    return made.double()


def delta(peft_model, kind, path):
    """The change (o, i) of one layer, written out."""
    names = {n: n.removesuffix(".weight").rpartition(".")[2] for n in shared_parameters(peft_model)}
    part = {names[n]: p for n, p in shared_parameters(peft_model).items() if f".{path}." in n}
    if kind == "lora":
        return ALPHA / RANK * part["lora_B"] @ part["lora_A"]
    if kind == "adalora":
        return ALPHA / (RANK + 1e-5) * part["lora_B"] @ torch.diag(part["lora_E"][:, 0]) @ part["lora_A"]
    if kind == "loha":
        products = (part[f"hada_w{i}_a"] @ part[f"hada_w{i}_b"] for i in (1, 2))
        return ALPHA / RANK * torch.mul(*products)
    o, i = len(part["vera_lambda_b"]), peft_model.get_base_model().get_submodule(path).in_features
    tuner = peft_model.base_model
    down, up = tuner.vera_A["default"][:, :i], tuner.vera_B["default"][:o]
    return torch.diag(part["vera_lambda_b"]) @ up @ torch.diag(part["vera_lambda_d"]) @ down


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_starts_unchanged_and_then_is_the_formula(case, kind):
    peft_model = adapted(case, kind)
    plain = case.outputs(case.model, case.inputs)
    torch.testing.assert_close(case.outputs(peft_model, case.inputs), plain)
    shake(peft_model)
    base, expected = peft_model.get_base_model(), copy.deepcopy(case.model)
    paths = [n for n, m in base.named_modules() if hasattr(m, "base_layer")]
    assert len(paths) == 2 * 7, "of each block: two and three of attention, two of the feed-forward layer"
    with torch.no_grad():
        for path in paths:
            change = delta(peft_model, kind, path)
            weight = expected.get_submodule(path).weight
            weight += change.T.to(weight)  # Conv1D holds (i, o)
    torch.testing.assert_close(case.outputs(peft_model, case.inputs), case.outputs(expected, case.inputs))
    assert not torch.allclose(case.outputs(expected, case.inputs), plain)


WORDS = ("transformer.wte.weight",)


@pytest.mark.parametrize(("kind", "extra"), [*((kind, ()) for kind in KINDS), ("lora", WORDS)])
def test_its_folder_is_loaded_here_and_by_peft(case, kind, extra, tmp_path):
    earlier = adapted(case, "lora", extra=WORDS)
    write_adapter(tmp_path, shared_state(earlier), adapter_config(earlier))  # is replaced whole
    peft_model = adapted(case, kind, extra=extra)
    shake(peft_model)
    expected = case.outputs(peft_model, case.inputs)
    config = adapter_config(peft_model)
    write_adapter(tmp_path, {n: v.double() for n, v in shared_state(peft_model).items()}, config)
    files = ["adapter_config.json", "adapter_model.safetensors"] + ["extra.safetensors"] * bool(extra)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    ours = add_like(copy.deepcopy(case.model), config, targets=GPT2_TARGETS, extra=extra, name="default").double()
    load_shared_state(ours, read_adapter(tmp_path))
    base = copy.deepcopy(case.model)
    if extra:
        base.load_state_dict(load_file(tmp_path / files[-1]), strict=False)
    if kind == "loha":
        replace_conv1d(base, GPT2_TARGETS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")  # of which PEFT only warns
        theirs = PeftModel.from_pretrained(base, str(tmp_path)).double().eval()
    for model in (ours, theirs):
        torch.testing.assert_close(case.outputs(model, case.inputs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_depends_on_the_seed_and_on_nothing_else(case, kind):
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    with_words = adapted(case, kind, extra=WORDS)
    first = shared_state(with_words)
    assert [name for name in first if adapter_of(name) is None] == [*WORDS]
    assert sum(p.requires_grad for p in with_words.parameters()) == len(first), "what is trained travels"
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(12)
    again, other = shared_state(adapted(case, kind)), adapted(case, kind, seed=4)
    assert all(torch.equal(v, first[n]) for n, v in again.items())
    if kind == "vera":  # the seed is that of the projections, which do not travel
        assert not torch.equal(adapted(case, kind).base_model.vera_A["default"], other.base_model.vera_A["default"])
    else:
        assert any(not torch.equal(v, again[n]) for n, v in shared_state(other).items())
