"""Small adapted models, and Eq. 4 written out for one patient at a time, for the tests of the patient part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora

COMPONENTS, STEPS, RANK, ALPHA, SCALE = 5, 4, 2, 6, 0.7
BATCH, SLICES = 3, 2
VOCABULARY, END, PAD = 19, 17, 18


@dataclass
class Case:
    """A base model, what is adapted, and its outputs with the samples of the batch first."""

    model: nn.Module
    targets: Sequence[str]
    inputs: dict[str, Tensor]  # leading dimension B * rows
    rows: int
    outputs: Callable[[Callable[..., Any], dict[str, Tensor]], Tensor]

    def of_sample(self, p: int) -> dict[str, Tensor]:
        return {name: value[p * self.rows : (p + 1) * self.rows] for name, value in self.inputs.items()}


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cvt_case() -> Case:
    config = transformers.CvtConfig(
        embed_dim=[8, 8, 16], num_heads=[1, 1, 2], depth=[1, 2, 3], drop_path_rate=[0.0, 0.0, 0.0], mlp_ratio=[2.0] * 3
    )
    targets = ["*.projection_query", "*.projection_key", "*.projection_value", "*.dense"]
    inputs = {"pixel_values": normal(BATCH * SLICES, 3, 32, 32)}
    outputs = lambda model, inputs: model(**inputs).last_hidden_state  # noqa: E731
    return Case(transformers.CvtModel(config), targets, inputs, SLICES, outputs)


GPT2_TARGETS = ("*.c_attn", "*.q_attn", "*.c_proj", "*.c_fc")


def gpt2_case() -> Case:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": PAD}
    still = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **tokens, **still, add_cross_attention=True)
    ids = torch.randint(0, VOCABULARY, (BATCH, 7), generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": ids, "encoder_hidden_states": normal(BATCH, 5, 16)}
    model = transformers.GPT2LMHeadModel(config)
    return Case(model, GPT2_TARGETS, inputs, 1, lambda model, inputs: model(**inputs).logits)


def timm_case(name: str, targets: Sequence[str], image: int, **settings: Any) -> Case:
    model = timm.create_model(name, pretrained=False, num_classes=0, img_size=image, **settings)
    features = {"x": normal(BATCH * SLICES, 3, image, image)}
    return Case(model, targets, features, SLICES, lambda model, inputs: model(**inputs))


VIT = ("blocks.*.qkv", "blocks.*.proj", "blocks.*.fc[12]")
SWIN = ("layers.*.qkv", "layers.*.proj", "layers.*.fc[12]", "layers.*.reduction")
CASES: dict[str, Callable[[], Case]] = {
    "cvt": cvt_case,
    "gpt2": gpt2_case,
    "vit": lambda: timm_case("vit_tiny_patch16_224", VIT, 32, depth=2, embed_dim=24, num_heads=3),
    "swin": lambda: timm_case("swin_tiny_patch4_window7_224", SWIN, 56, embed_dim=8, depths=(2, 2), num_heads=(2, 2)),
}


def shake(module: nn.Module, size: float = 0.1) -> None:
    """Move every trained parameter off its start, where half of all gradients vanish."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def adapted(model: nn.Module, lora_targets: Sequence[str], /, **changes: Any) -> tuple[Any, PatientLoRA]:
    peft_model = add_lora(model, targets=lora_targets, rank=RANK, alpha=ALPHA, seed=4)
    sizes = {"rank": RANK, "time_steps": STEPS, "seed": 5, "embedding_dim": 6}
    sizes = {name: changes.pop(name, value) for name, value in sizes.items()}
    config = PatientConfig(**{"scale": SCALE, "components": COMPONENTS} | changes)
    return peft_model, PatientLoRA(peft_model, config, **sizes)


def patients(samples: int = BATCH) -> tuple[Tensor, Tensor]:
    q = torch.softmax(3 * normal(samples, COMPONENTS, seed=6), dim=1)
    return q, torch.arange(samples) % STEPS + 1


def layer_paths(peft_model: Any) -> list[str]:
    """Of the adapted layers, in their order."""
    end = ".lora_A.default.weight"
    names = [name for name, _ in peft_model.named_parameters() if name.endswith(end)]
    return sorted(name.removeprefix("base_model.model.").removesuffix(end) for name in names)


def of_layers(peft_model: Any, patient: PatientLoRA, *values: Tensor) -> dict[tuple[str, str, str], Tensor]:
    """The rows of the hypernetworks by layer, half (a or b) and kind; ``values`` may stand for weight and bias."""
    shared = dict(peft_model.named_parameters())
    keys = [(path, half) for half in "ab" for path in layer_paths(peft_model)]
    sides = [(f"base_model.model.{path}.lora_{half.upper()}.default.weight", half == "a") for path, half in keys]
    sizes = [patient.rank * shared[name].shape[int(second)] for name, second in sides]
    return {
        (*key, kind): rows
        for kind, own in zip(("weight", "bias"), values or patient.hypernetworks.parameters(), strict=True)
        for key, rows in zip(keys, own.split(sizes), strict=True)
    }


def written_out_weights(base: nn.Module, peft_model: Any, patient: PatientLoRA, q: Tensor, step: Tensor) -> Any:
    """``W + s A B^T + s_p A_p B_p^T`` of one patient for every adapted layer, by parameter name of the base model."""
    own = dict(patient.named_parameters())
    shared = dict(peft_model.named_parameters())
    if patient.config.constant_q:
        q = torch.full_like(q, 1 / len(q))
    phi = own["projection.weight"] @ q + own["projection.bias"]
    if "time_embedding" in own:
        phi = phi + own["time_embedding"][int(step) - 1]
    rank, weights = patient.rank, {}
    rows = of_layers(peft_model, patient)
    for path in layer_paths(peft_model):
        lora = f"base_model.model.{path}.lora_"
        down, up = shared[f"{lora}A.default.weight"], shared[f"{lora}B.default.weight"]
        delta = ALPHA / RANK * up @ down
        a, b = (rows[path, half, "weight"] @ phi + rows[path, half, "bias"] for half in "ab")
        delta = delta + SCALE * b.reshape(rank, -1).T @ a.reshape(rank, -1)
        layer = base.get_submodule(path)
        weights[f"{path}.weight"] = layer.weight + (delta if isinstance(layer, nn.Linear) else delta.T)
    return weights


def one(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(OrderedDict(layer=nn.Linear(inputs, outputs)))


def one_layer(inputs: int = 6, outputs: int = 4, **changes: Any) -> tuple[Any, PatientLoRA]:
    peft_model, patient = adapted(one(inputs, outputs).double(), ["layer"], **changes)
    shake(peft_model)
    shake(patient)
    return peft_model, patient
