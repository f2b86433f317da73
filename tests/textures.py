"""Made-up diseases for classifiers: 32 x 32 textures mixed from three hidden patterns, at sites of different styles."""

import math

import torch

from fedtar_flare.fedkei.examples import ArrayExamples, TaskData, keyed

SIZE = 32
DISEASES = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.85, 0.55, 0.0), (0.0, 0.0, 1.0), (0.0, 0.55, 0.85))
"""Strength of each hidden pattern, by disease. In this order the third and fifth are related to earlier ones, the
second and fourth are not."""
MAIN_PATTERN = (0, 1, 0, 2, 2)
RELATED, UNRELATED = (3, 5), (2, 4)
"""Tasks, from 1, in the order above."""


def pattern(kind, generator):
    """One hidden pattern (32, 32) of mean about 0, at a random phase: stripes, spots, rings."""
    u = torch.rand(4, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE) / SIZE, torch.arange(SIZE) / SIZE, indexing="ij")
    turn = 2 * math.pi
    if kind == 0:
        angle = 0.5 + 0.3 * float(u[2])
        return torch.sin(turn * (5 * (x * math.cos(angle) + y * math.sin(angle)) + u[0]))
    if kind == 1:
        return torch.sin(turn * (4 * x + u[0])) * torch.sin(turn * (4 * y + u[1])) * 1.6
    radius = ((x - 0.3 - 0.4 * u[0]) ** 2 + (y - 0.3 - 0.4 * u[1]) ** 2).sqrt()
    return torch.sin(turn * (6 * radius + u[2]))


def picture(strengths, style, generator):
    """A uint8 picture (3, 32, 32): a smooth background, the patterns, noise and a tint."""
    coarse = torch.randn(1, 1, 5, 5, generator=generator)
    image = torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic")[0, 0] * 0.8
    strong = 0.5 + 0.5 * float(torch.rand(1, generator=generator))
    for kind, strength in enumerate(strengths):
        if strength:
            image = image + style["contrast"] * strong * strength * pattern(kind, generator)
    image = image + style["noise"] * torch.randn(SIZE, SIZE, generator=generator)
    tinted = 128 + style["light"] + 36 * image[None] * torch.tensor(style["tint"])[:, None, None]
    return tinted.clamp(0, 255).to(torch.uint8)


def style_of(site, seed=0):
    """A site's contrast, noise, light and tint."""
    u = torch.rand(6, generator=keyed("style", site, seed)).tolist()
    return {
        "contrast": 0.45 + 0.25 * u[0],
        "noise": 0.5 + 0.4 * u[1],
        "light": 30 * (u[2] - 0.5),
        "tint": [0.8 + 0.4 * one for one in u[3:]],
    }


def examples(site, new, before, count, split, seed=0, diseases=DISEASES):
    """``count`` examples, half of the disease ``new`` (its index), the others of no disease or one of ``before``.

    They depend on these arguments alone.
    """
    generator = keyed("examples", site, new, split, seed)
    style, labels, images = style_of(site, seed), [], []
    others = [(0.0,) * 3, *(diseases[i] for i in before)]
    for n in range(count):
        labels.append(n % 2)
        images.append(picture(diseases[new] if n % 2 else others[n // 2 % len(others)], style, generator))
    return ArrayExamples(torch.stack(images), torch.tensor(labels))


def task_data(site, order, task, seed=0, sizes=(96, 32, 96), diseases=DISEASES):
    """A site's data of task ``task`` (from 1) in its ``order`` of diseases."""
    new, before = order[task - 1], order[: task - 1]
    return TaskData(
        *(
            examples(site, new, before, count, split, seed, diseases)
            for split, count in zip(("train", "validation", "test"), sizes, strict=True)
        )
    )
