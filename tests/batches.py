"""Batches of images of noise."""

import torch

from fedtar_flare.imaging.batch import ImageBatch


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(weights, seed=1, scale=0.01):
    """Weights near others."""
    generator = torch.Generator().manual_seed(seed)
    return {name: value + scale * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def noise(count=2, slices=4, size=32, *, seed=0, gap_mm=20.0, there=()):
    """``count`` images; ``there`` gives the number of their first slices that are no padding, by row (else all)."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, slices, 3, size, size), dtype=torch.uint8, generator=generator)
    batch = ImageBatch(images, gap_mm * torch.arange(slices).repeat(count, 1), torch.ones(count, slices).bool())
    for row, number in enumerate(there):
        batch.slice_mask[row, number:] = False
    return batch


def rows(batch, at):
    """Some rows of a batch; one by its number."""
    at = slice(at, at + 1) if isinstance(at, int) else at
    return ImageBatch(batch.images[at], batch.position_mm[at], batch.slice_mask[at])


def padded(batch, extra):
    """A batch with so many more slices, all of them padding."""
    count, size = len(batch.images), batch.images.shape[-1]
    more = noise(count, extra, size, seed=99, gap_mm=777.0, there=[0] * count)
    return ImageBatch(
        torch.cat([batch.images, more.images], 1),
        torch.cat([batch.position_mm, more.position_mm], 1),
        torch.cat([batch.slice_mask, more.slice_mask], 1),
    )


def kept_bytes(parameters, run):
    """Bytes of all tensors but the parameters that autograd holds for the backward pass of what ``run`` computes."""
    own, result = {parameter.untyped_storage()._cdata for parameter in parameters}, {}

    def keep(tensor):
        result[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert run().requires_grad
    return sum(storage.nbytes() for at, storage in result.items() if at not in own)


def whole(model, ids):
    """A report's ids up to its end."""
    ids = ids.tolist()
    return ids[: ids.index(model.eos_id) + 1] if model.eos_id in ids else ids


@torch.no_grad()
def greedy(model, batch, length):
    """Reports of the likeliest words one by one, by :meth:`ReportGenerator.decode`; ids up to their ends."""
    seen = model.encoded(batch)
    memory, mask = model.memory(batch, seen)
    prompts = model.prompts(seen)
    ids = torch.full((len(memory), 1), model.bos_id)
    for _ in range(length - 1):
        logits, _ = model.decode(memory, mask, ids, prompts)
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return [whole(model, row) for row in ids]
