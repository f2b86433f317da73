"""Random draws that an attacker must not guess: orders of visits, patients of DP-SGD, and noise.

torch's CPU generator uses 32 bits of its seed, so whoever sees what was computed from its draws can try them all (the
noise of per-patient DP-SGD was told in minutes, from the signs of 192 values of an update). What must stay secret
therefore never comes from it: noise comes from the operating system, an order from a seed of 256 bits. In a simulation
nobody is a patient, and the job names the seed: there torch's generator gives runs that anyone can repeat.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

SECRET = 2**255
"""Least secret seed; a public one is below 2**63."""


def derived_seed(seed: int, *parts: object) -> int:
    """Derive a seed for one purpose: secret from a secret one (256 bits), else public (56 bits)."""
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest, "big") | SECRET if seed >= SECRET else int.from_bytes(digest[:7], "big")


def orders(count: int, seed: int) -> Iterator[list[int]]:
    """One random order of ``range(count)`` after another; of a secret seed by as many 64-bit words of SHAKE-256."""
    generator = None if seed >= SECRET else torch.Generator().manual_seed(seed)
    for number in itertools.count():
        if generator is None:
            words = hashlib.shake_256(f"{seed}/{number}".encode()).digest(8 * count)
            yield np.argsort(np.frombuffer(words, np.uint64), kind="stable").tolist()
        else:
            yield torch.randperm(count, generator=generator).tolist()


def uniforms(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw values (count,) in (0, 1), from the operating system (float64) or a simulation's generator (float32)."""
    if generator is not None:
        return torch.rand(count, generator=generator)
    words = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)
    return torch.from_numpy((words.astype(np.float64) + 0.5) * 2.0**-53)


def standard_normals(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw standard normal values (count,), from the operating system (float64) or a simulation's generator (float32).

    Each of the former is half the sum of four independent ones by Box and Muller: a single floating-point sample has
    gaps by which the noise could be told from what it hides (Mironov 2012); four fill them (Holohan and Braghin 2021).
    """
    if generator is not None:
        return torch.randn(count, generator=generator)
    values = torch.empty(count, dtype=torch.float64)
    for block in values.split(2**20):  # four draws of eight bytes a value, and their copies, take room
        radius, angle = uniforms(4 * len(block)).reshape(2, -1)  # in (0, 1), never 0
        radius = torch.sqrt(-2 * torch.log(radius))
        pair = torch.cat([radius * torch.cos(2 * math.pi * angle), radius * torch.sin(2 * math.pi * angle)])
        block.copy_(pair.reshape(4, -1).sum(0) / 2)
    return values
