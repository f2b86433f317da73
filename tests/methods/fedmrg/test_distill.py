"""Distillation against torch's own losses, and that no gradient reaches the teacher, padding or prompts."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fedtar_flare.methods.fedmrg.distill import distill_losses

B, L, E, V = 3, 6, 4, 9


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case():
    labels = torch.randint(0, V, (B, L), generator=torch.Generator().manual_seed(5))
    labels[1, 4:] = -100
    labels[2, 2:] = -100
    return normal(B, L, E, seed=1), normal(B, L, V, seed=2), normal(B, L, E, seed=3), normal(B, L, V, seed=4), labels


@pytest.mark.parametrize("with_states", [True, False])
def test_it_is_torch_s_cosine_and_divergence_token_by_token(with_states):
    states, logits, t_states, t_logits, labels = case()
    found = distill_losses(states, logits, t_states, t_logits, labels, with_states)
    for b in range(B):
        tokens = []
        for i in range(L - 1):
            if labels[b, i + 1] == -100:
                continue
            cosine = F.cosine_embedding_loss(states[b, i][None], t_states[b, i][None], torch.ones(1))
            own, taught = logits[b, i].log_softmax(0), t_logits[b, i].log_softmax(0)
            tokens.append(with_states * cosine + F.kl_div(own, taught, log_target=True, reduction="sum"))
        assert float(found[b]) == pytest.approx(float(sum(tokens) / len(tokens)), rel=1e-5)


def test_equals_teach_nothing():
    states, logits, _, _, labels = case()
    assert distill_losses(states, logits, states, logits, labels).abs().max() < 1e-6


def test_neither_teacher_nor_padding_has_a_gradient():
    states, logits, t_states, t_logits, labels = (part.clone() for part in case())
    learned = [part.requires_grad_() for part in (states, logits, t_states, t_logits)]
    distill_losses(*learned, labels).sum().backward()
    assert t_states.grad is None and t_logits.grad is None
    for gradient in (states.grad, logits.grad):
        there = (labels[:, 1:] != -100)[..., None].expand_as(gradient[:, :-1])
        assert not gradient[:, :-1][~there].any() and not gradient[:, -1].any(), "nothing is predicted there"
        assert gradient[:, :-1][there].any()
