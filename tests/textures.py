"""Made-up diseases for classifiers: 32 x 32 textures mixed from three hidden patterns, at sites of different styles."""

import hashlib
import math
from dataclasses import dataclass

import torch

from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.methods.fedkei.tasks import TaskData

SIZE = 32
DISEASES = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.85, 0.55, 0.0), (0.0, 0.0, 1.0), (0.0, 0.55, 0.85))
"""Strength of each hidden pattern, by disease. In this order the third and fifth are related to earlier ones."""


def keyed(*parts):
    """A random generator by these parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@dataclass(frozen=True)
class ArrayExamples:
    """Examples in memory: uint8 images (n, 3, H, W), or (n, S, 3, H, W) of S slices each, and labels (n,)."""

    images: torch.Tensor
    labels: torch.Tensor

    @property
    def patients(self):
        return [*map(str, range(len(self.labels)))]

    def batch(self, indices):
        images = self.images[list(indices)]
        images = images[:, None] if images.dim() == 4 else images
        return ImageBatch(images, torch.zeros(images.shape[:2]), torch.ones(images.shape[:2], dtype=torch.bool))


def patterns(kind, count, generator):
    """A hidden pattern (count, 32, 32) of mean about 0, each at a random phase: stripes, spots, rings."""
    u = torch.rand(3, count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE) / SIZE, torch.arange(SIZE) / SIZE, indexing="ij")
    turn = 2 * math.pi
    if kind == 0:
        angle = 0.5 + 0.3 * u[2]
        return torch.sin(turn * (5 * (x * angle.cos() + y * angle.sin()) + u[0]))
    if kind == 1:
        return torch.sin(turn * (4 * x + u[0])) * torch.sin(turn * (4 * y + u[1])) * 1.6
    radius = ((x - 0.3 - 0.4 * u[0]) ** 2 + (y - 0.3 - 0.4 * u[1]) ** 2).sqrt()
    return torch.sin(turn * (6 * radius + u[2]))


def pictures(strengths, style, generator):
    """uint8 pictures (n, 3, 32, 32) of patterns of ``strengths`` (n, 3): smooth background, patterns, noise, a tint."""
    count = len(strengths)
    coarse = torch.randn(count, 1, 5, 5, generator=generator)
    image = torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bicubic")[:, 0] * 0.8
    strong = style["contrast"] * (0.5 + 0.5 * torch.rand(count, 1, 1, generator=generator))
    for kind in range(strengths.shape[1]):
        image = image + strong * strengths[:, kind, None, None] * patterns(kind, count, generator)
    image = image + style["noise"] * torch.randn(count, SIZE, SIZE, generator=generator)
    tinted = 128 + style["light"] + 36 * image[:, None] * torch.tensor(style["tint"])[:, None, None]
    return tinted.clamp(0, 255).to(torch.uint8)


def style_of(site, seed=0):
    """A site's contrast, noise, light and tint."""
    u = torch.rand(6, generator=keyed("style", site, seed)).tolist()
    return {
        "contrast": 0.9 + 0.4 * u[0],
        "noise": 0.4 + 0.3 * u[1],
        "light": 30 * (u[2] - 0.5),
        "tint": [0.8 + 0.4 * one for one in u[3:]],
    }


def examples(site, new, before, count, split, seed=0):
    """``count`` examples, half of the disease ``new`` (its index), the others of no disease or one of ``before``.

    They depend on these arguments alone.
    """
    generator = keyed("examples", site, new, split, seed)
    labels = torch.arange(count) % 2
    others = torch.tensor([(0.0,) * 3, *(DISEASES[i] for i in before)])
    strengths = others[torch.arange(count) // 2 % len(others)]
    strengths[labels == 1] = torch.tensor(DISEASES[new])
    return ArrayExamples(pictures(strengths, style_of(site, seed), generator), labels)


def task_data(site, order, task, seed=0, sizes=(96, 32, 96)):
    """A site's data of task ``task`` (from 1) in its ``order`` of diseases."""
    new, before = order[task - 1], order[: task - 1]
    parts = zip(("train", "validation", "test"), sizes, strict=True)
    return TaskData(*(examples(site, new, before, count, split, seed) for split, count in parts))
