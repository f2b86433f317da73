"""Pools of random modules around three patterns."""

import torch

from fedtar_flare.methods.fedkei.pool import Pool

NAMES = {
    "base_model.model.encoder.a.qkv.lora_A.weight": (2, 6),
    "base_model.model.encoder.a.qkv.lora_B.weight": (9, 2),
    "head.bias": (2,),
    "head.weight": (2, 5),
}


def random_module(seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=g) for name, shape in NAMES.items()}


def pool_of(sites=3, tasks=2, seed=0, order=None):
    """Modules of each site and task near one of two patterns, by task; added in the ``order`` of these pairs."""
    pool = Pool(random_module(10_000))
    pairs = [(f"site-{i + 1}", t + 1) for t in range(tasks) for i in range(sites)]
    for site, task in order or pairs:
        near, noise = random_module(task % 2, 2.0), random_module(100 * int(site[-1:]) + 7 * task + seed, 0.3)
        pool.add(site, task, {name: near[name] + noise[name] for name in NAMES})
    return pool


def same(a, b):
    """Whether two dictionaries of tensors hold the same bits."""
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
