"""AdaLoRA, VeRA and LoHa: the formula of each, what travels under which name, and folders that PEFT loads."""

import copy

import pytest
import torch
from adapted_models import GPT2_TARGETS, gpt2_case, shake

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.adapters.kinds import add_adapter, add_like, replace_conv1d, without_adapter
from fedtar_flare.models.adapters.lora import adapter_config, load_shared_state, shared_parameters, shared_state
from fedtar_flare.models.adapters.peft_file import adapter_of, read_adapter, write_adapter

RANK, ALPHA = 4, 8.0
KINDS = ("adalora", "vera", "loha")


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    case = gpt2_case()
    case.model.double().eval()
    return case


def adapted(case, kind, seed=3, **more):
    model = copy.deepcopy(case.model)
    return add_adapter(model, kind, targets=GPT2_TARGETS, rank=RANK, alpha=ALPHA, seed=seed, **more).double()


def delta(peft_model, kind, path):
    """The change (o, i) of one layer, written out."""
    part = {n.rpartition(".")[2]: p for n, p in shared_parameters(peft_model).items() if f".{path}." in n}
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


@pytest.mark.parametrize("kind", KINDS)
def test_it_depends_on_the_seed_and_on_nothing_else(case, kind):
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    with_words = adapted(case, kind, extra=("transformer.wte.weight",))
    first = shared_state(with_words)
    assert [name for name in first if adapter_of(name) is None] == ["transformer.wte.weight"]
    assert sum(p.requires_grad for p in with_words.parameters()) == len(first), "what is trained travels"
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(12)
    again, other = shared_state(adapted(case, kind)), adapted(case, kind, seed=4)
    assert all(torch.equal(v, first[n]) for n, v in again.items())
    if kind == "vera":  # the seed is that of the projections, which do not travel
        assert not torch.equal(adapted(case, kind).base_model.vera_A["default"], other.base_model.vera_A["default"])
    else:
        assert any(not torch.equal(v, again[n]) for n, v in shared_state(other).items())


@pytest.mark.parametrize("kind", KINDS)
def test_its_folder_is_loaded_here_and_by_peft(case, kind, tmp_path):
    from peft import PeftModel

    peft_model = adapted(case, kind)
    shake(peft_model)
    expected = case.outputs(peft_model, case.inputs)
    config = adapter_config(peft_model)
    write_adapter(tmp_path, {n: v.double() for n, v in shared_state(peft_model).items()}, config)
    ours = add_like(copy.deepcopy(case.model), config, targets=GPT2_TARGETS, extra=(), name="default").double()
    load_shared_state(ours, read_adapter(tmp_path))
    base = copy.deepcopy(case.model)
    if kind == "loha":
        replace_conv1d(base, GPT2_TARGETS)
    for model in (ours, PeftModel.from_pretrained(base, str(tmp_path)).double().eval()):
        torch.testing.assert_close(case.outputs(model, case.inputs), expected, rtol=1e-5, atol=1e-6)


def test_without_an_adapter_the_named_parameters_alone_are_trained(case):
    bare = without_adapter(copy.deepcopy(case.model), ("transformer.h.0.*",))
    assert {n for n, p in bare.get_base_model().named_parameters() if p.requires_grad} == set(shared_parameters(bare))
    torch.testing.assert_close(case.outputs(bare.get_base_model(), case.inputs), case.outputs(case.model, case.inputs))
    with pytest.raises(ConfigError, match=r"lora\.exchange must name"):
        without_adapter(copy.deepcopy(case.model), ())
