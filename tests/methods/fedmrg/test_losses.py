"""The contrast against a double loop and its closed gradient, the distillation against torch's own losses."""

import math

import pytest
import torch
from torch.nn import functional as F

from fedtar_flare.methods.fedmrg.losses import contrast_losses, distill_losses, features

B, L, E, V = 3, 6, 4, 9


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(vectors):
    return F.normalize(vectors, dim=-1)


def by_loops(u, v, patients, bank, tau):
    losses = []
    for i in range(len(u)):
        others = [a for a in range(len(u)) if patients[a] != patients[i]]
        against = [u[a] for a in others] + [v[a] for a in others] + list(bank)
        if not against:
            losses.append(torch.zeros((), dtype=u.dtype))
            continue
        total = sum(math.exp(float(u[i] @ z) / tau) for z in against)
        losses.append(-(u[i] @ v[i]) / tau + math.log(total))
    return torch.stack(losses)


CASES = [(4, 3, [0, 1, 2, 3]), (5, 0, [0, 0, 1, 1, 2]), (3, 2, [7, 7, 7]), (1, 4, [0]), (1, 0, [0]), (2, 0, [3, 3])]


@pytest.mark.parametrize(("n", "m", "patients"), CASES)
def test_it_is_the_double_loop_and_finite_with_its_gradient(n, m, patients):
    u, v, bank, ids = unit(normal(n, 5)), unit(normal(n, 5, seed=1)), unit(normal(m, 5)), torch.tensor(patients)
    u.requires_grad_()
    losses = contrast_losses(u, v, ids, bank, temperature=0.3)
    expected = by_loops(u.detach(), v, patients, bank, 0.3)
    torch.testing.assert_close(losses.detach(), expected, rtol=0, atol=1e-12)
    losses.sum().backward()
    assert torch.isfinite(u.grad).all()


def test_features_are_unit_means_over_tokens_and_slices_that_are_there():
    tokens, mask = normal(2, 3, 4, 5), torch.tensor([[True, True, False], [True, True, True]])
    result = features(tokens, mask)
    by_hand = [tokens[0, :2].reshape(-1, 5).mean(0), tokens[1].reshape(-1, 5).mean(0)]
    for row, mean in zip(result, by_hand, strict=True):
        torch.testing.assert_close(row, (mean / mean.norm()).float(), rtol=1e-6, atol=1e-7)


def reports():
    labels = torch.randint(0, V, (B, L), generator=torch.Generator().manual_seed(5))
    labels[1, 4:] = -100
    labels[2, 2:] = -100
    shapes = ((B, L, E), (B, L, V), (B, L, E), (B, L, V))
    return *(normal(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes, 1)), labels


@pytest.mark.parametrize("with_states", [True, False])
def test_distillation_is_torch_s_cosine_and_divergence_token_by_token(with_states):
    states, logits, t_states, t_logits, labels = reports()
    result = distill_losses(states, logits, t_states, t_logits, labels, with_states)
    for b in range(B):
        tokens = []
        for i in range(L - 1):
            if labels[b, i + 1] == -100:
                continue
            cosine = F.cosine_embedding_loss(states[b, i][None], t_states[b, i][None], torch.ones(1))
            own, taught = logits[b, i].log_softmax(0), t_logits[b, i].log_softmax(0)
            tokens.append(with_states * cosine + F.kl_div(own, taught, log_target=True, reduction="sum"))
        assert float(result[b]) == pytest.approx(float(sum(tokens) / len(tokens)), rel=1e-5)


def test_neither_teacher_nor_padding_has_a_gradient():
    states, logits, t_states, t_logits, labels = (part.clone() for part in reports())
    learned = [part.requires_grad_() for part in (states, logits, t_states, t_logits)]
    distill_losses(*learned, labels).sum().backward()
    assert t_states.grad is None and t_logits.grad is None
    for gradient in (states.grad, logits.grad):
        there = (labels[:, 1:] != -100)[..., None].expand_as(gradient[:, :-1])
        assert not gradient[:, :-1][~there].any() and not gradient[:, -1].any(), "nothing is predicted there"
        assert gradient[:, :-1][there].any()
