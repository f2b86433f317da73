"""Per-patient DP-SGD: patients are drawn at random, each one's gradient is clipped, and noise is added to the sum.

Abadi et al. 2016 (*Deep learning with differential privacy*), with a patient in place of an example, as McMahan et al.
2018 do with a user: all visits of a patient in an update count together. Two data sets are neighbours if one has a
patient more. All that is trained, shared or the site's own, is clipped and noised as one vector.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fedtar_flare.core.draws import standard_normals, uniforms


def poisson_batches(
    patients: Sequence[str], rate: float, count: int, generator: torch.Generator | None = None
) -> Iterator[list[int]]:
    """Give ``count`` lists of the visits of the patients drawn, each with probability ``rate``; some are empty."""
    names = list(dict.fromkeys(patients))
    for _ in range(count):
        drawn = {
            name for name, value in zip(names, uniforms(len(names), generator).tolist(), strict=True) if value < rate
        }
        yield [i for i, patient in enumerate(patients) if patient in drawn]


def add_private_gradients(
    parameters: Sequence[nn.Parameter],
    patients: Sequence[Callable[[], Tensor]],
    *,
    clip: float,
    noise_multiplier: float,
    reports: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Set the gradients to the noisy sum over patients of clipped gradients, divided by ``reports``.

    Each of ``patients`` sets a patient's gradients and gives the loss; the sum of the losses is returned, float64.
    """
    loss = torch.zeros((), dtype=torch.float64)
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    for backward in patients:
        own = backward().to(loss)
        gradients = [parameter.grad for parameter in parameters]
        norm = nn.utils.get_total_norm([g.float() for g in gradients if g is not None])
        if torch.isfinite(norm + own):  # else the update would be skipped, which no noise covers
            loss += own
            factor = (clip / norm.clamp(min=1e-30)).clamp(max=1.0)
            for total, gradient in zip(sums, gradients, strict=True):
                total += 0.0 if gradient is None else factor * gradient
    for parameter, total in zip(parameters, sums, strict=True):
        noise = standard_normals(total.numel(), generator).reshape(total.shape).to(total.device)
        parameter.grad = ((total + noise_multiplier * clip * noise) / reports).to(parameter.dtype)
    return loss
