"""What a training step with patient adapters launches on a GPU, counted without one; and that torch can compile it."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from adapted_models import shake
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora, target_names
from fedtar_flare.models.config import preset

VIEWS = {
    "_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
BATCH, RANK, STEPS, WORDS = 4, 4, 3, 64
TARGETS = preset("paper").lora_targets


class Kernels(TorchDispatchMode):
    """How many operations were made that are no views."""

    def __init__(self):
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).split(".")[1]
        if name not in VIEWS:
            self.made[name] += 1
        return function(*args, **(kwargs or {}))


class Writer(nn.Module):
    """The paper's CvT and DistilGPT2 in depth, and narrow: kernels do not depend on widths."""

    def __init__(self, depth=(1, 4, 16), layers=6):
        from transformers.models.cvt.configuration_cvt import CvtConfig
        from transformers.models.cvt.modeling_cvt import CvtModel
        from transformers.models.gpt2.configuration_gpt2 import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

        super().__init__()
        torch.manual_seed(0)
        widths, heads = ([8, 16, 32], [1, 1, 2]) if len(depth) == 3 else ([32], [2])
        self.encoder = CvtModel(CvtConfig(embed_dim=widths, depth=list(depth), num_heads=heads, cls_token=[False] * 3))
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
        self.decoder = GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=WORDS, add_cross_attention=True, **ends)
        )
        self.projection = nn.Linear(32, 32, bias=False)
        self.eval()

    def forward(self, images, ids):
        states = self.encoder(images).last_hidden_state.flatten(2).transpose(1, 2)
        logits = self.decoder(ids, encoder_hidden_states=self.projection(states), use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def batch(length=12):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(WORDS, (BATCH, length), generator=generator)
    return torch.randn(BATCH, 3, 32, 32, generator=generator), ids


def with_patients(base):
    """Our model, its patient part, and a batch of patients."""
    model = add_lora(base, targets=TARGETS, rank=RANK, alpha=128, seed=0)
    patient = PatientLoRA(model, PatientConfig(), rank=RANK, time_steps=STEPS, seed=0)
    return model, patient, (torch.full((BATCH, 16), 1 / 16), torch.ones(BATCH, dtype=torch.long))


def kernels(model, autocast, context):
    """Of the second forward and backward pass."""
    images, ids = batch()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with Kernels() as counted:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), context():
                loss = model(images, ids)
            loss.backward()
    return counted.made


@pytest.mark.parametrize("autocast", [True, False])
def test_a_step_with_patient_adapters_launches_no_more_than_plain_peft(autocast):
    """0.67 times as many in autocast and 0.91 without."""
    from peft import LoraConfig, get_peft_model

    base = Writer()
    config = LoraConfig(r=RANK, lora_alpha=128, target_modules=target_names(base, TARGETS), lora_dropout=0.0)
    plain = get_peft_model(base, config)
    model, patient, of = with_patients(Writer())
    theirs, ours = kernels(plain, autocast, nullcontext), kernels(model, autocast, lambda: patient.adapt(*of))
    assert theirs.total() > 1000 and theirs["bmm"] < ours["bmm"]
    assert ours.total() <= theirs.total(), (theirs.most_common(9), ours.most_common(9))


@pytest.mark.slow
def test_torch_compiles_a_step_as_one_graph_and_once_more_for_reports_of_other_lengths():
    """And compiled, it reads each batch's own patients."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, patient, (q, steps) = with_patients(Writer(depth=(1,), layers=1))
    shake(patient)
    counter = CompileCounter()
    compiled = torch.compile(model.get_base_model(), backend=counter, fullgraph=True)
    for turn, length in enumerate((12, 12, 16, 9, 23, 12)):
        of = (torch.softmax(torch.randn(q.shape, generator=torch.Generator().manual_seed(turn)), 1), steps)
        result = []
        for run in (compiled, model):
            with torch.autocast("cpu", torch.bfloat16), patient.adapt(*of):
                loss = run(*batch(length))
            loss.backward()
            result.append([loss.detach(), *(parameter.grad for parameter in patient.parameters())])
            patient.zero_grad(set_to_none=True)
        torch.testing.assert_close(*result)
        assert any(bool(gradient.any()) for gradient in result[0][1:])
    assert counter.frame_count <= 3, "one graph, and at most two more"
