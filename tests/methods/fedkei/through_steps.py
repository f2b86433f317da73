"""The gradient in the centres by plain autograd through all inner steps, of a learner's own model and batches."""

import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedtar_flare.methods.fedkei.examples import shuffled


def gradient_through_steps(learner, stacked, train, task, first_order=False):
    """Outer loss, and its gradient in the centres by name; ``first_order``: the inner gradients are constants."""
    model, own = learner.classifier, learner.parameters()
    full_names = {id(p): name for name, p in model.named_parameters()}
    like = next(iter(own.values()))
    heads = {name: name.startswith("head.") for name in own}
    centres = {name: value.to(like).requires_grad_() for name, value in stacked.items()}
    many, eta, everything = len(next(iter(stacked.values()))), learner.settings.eta_in, range(len(train.labels))

    def loss(theta, indices):
        logits = functional_call(
            model, {full_names[id(own[n])]: v for n, v in theta.items()}, (train.batch(indices).to(like.device),)
        )
        return torch.nn.functional.cross_entropy(logits, train.labels[list(indices)])

    def theta_of(alpha):
        return {n: torch.tensordot(alpha[heads[n]], c, 1) for n, c in centres.items()}

    alpha = dict.fromkeys((False, True), torch.full((many,), 1 / many, dtype=like.dtype))
    with sdpa_kernel(SDPBackend.MATH):  # fused attention cannot be differentiated twice
        for batch in shuffled(everything, learner.settings.batch_size, learner.seed, task, "probe", 0):
            theta = theta_of(alpha)
            gradients = torch.autograd.grad(loss(theta, batch), list(theta.values()), create_graph=not first_order)
            moves = {False: 0.0, True: 0.0}
            for (name, c), g in zip(centres.items(), gradients, strict=True):
                moves[heads[name]] = moves[heads[name]] + (c * g[None]).flatten(1).sum(1)
            alpha = {head: alpha[head] - eta * moves[head] for head in alpha}
        whole = loss(theta_of(alpha), everything)
        return float(whole.detach()), dict(
            zip(centres, torch.autograd.grad(whole, list(centres.values())), strict=True)
        )
