"""Frozen stages of the encoder: seen once, with the same tokens as by the plain way, bit for bit in any batch."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import noise, rows

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.imaging.cache import store_computed
from fedtar_flare.learning.frozen import FrozenStages
from fedtar_flare.models.adapters.lora import add_lora
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import CVT_TARGETS, DECODER_TARGETS, preset

CONFIG = preset("tiny")
LAST_STAGE = ("encoder.*.stages.2.*.dense", *DECODER_TARGETS)
SLICES = (4, 2, 3)


def generator_of(targets):
    generator = build_model(CONFIG)
    model = add_lora(generator, targets=targets, rank=2, alpha=8, seed=0)
    with torch.no_grad():  # an adapter that has learnt something
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    return generator


def studies(*which):
    """Samples of some visits and their batch; visit i has SLICES[i] slices of noise."""
    visits = [Visit(f"p{i}", "v1", datetime(2020, 1, 1), Path("x"), "clear", "ct") for i in which]
    return [Sample(visit, None, "F", 1, "train") for visit in visits], rows(noise(3, there=SLICES), list(which))


def seen_by_first_stage(generator):
    """How many slices pass the first stage from now on, in a list of one number."""
    count = [0]
    stage = generator.encoder.stage_modules()[0]
    stage.register_forward_pre_hook(lambda module, inputs: count.__setitem__(0, count[0] + len(inputs[0])))
    return count


@pytest.mark.parametrize(("targets", "depth"), [(CVT_TARGETS, 0), (LAST_STAGE, 2), (DECODER_TARGETS, 3)])
def test_tokens_are_those_of_the_plain_way_and_only_the_stages_before_the_first_adapter_are_kept(targets, depth):
    generator = generator_of(targets)
    frozen = FrozenStages(generator)
    assert frozen.depth == depth
    samples, images = studies(0, 1, 2)
    plain, ours = generator.tokens(images), frozen.tokens(samples, images)
    torch.testing.assert_close(ours[images.slice_mask], plain[images.slice_mask], rtol=1e-5, atol=1e-6)

    count = seen_by_first_stage(generator)
    again = frozen.tokens(*studies(2, 0))
    assert (count[0] == 0) is (depth > 0)
    if depth:
        assert torch.equal(again[0, : SLICES[2]], ours[2, : SLICES[2]]), "the batch does not matter"
        assert torch.equal(again[1, : SLICES[0]], ours[0, : SLICES[0]])


def test_gradients_of_the_stages_that_learn_are_those_of_the_plain_way():
    found = []
    for kept in (False, True):
        generator = generator_of(LAST_STAGE)
        frozen, (samples, images) = FrozenStages(generator), studies(0, 1)
        for _ in range(2):  # the second time from what is kept
            generator.zero_grad()
            tokens = frozen.tokens(samples, images) if kept else generator.tokens(images)
            tokens[images.slice_mask].square().sum().backward()
        found.append({n: p.grad for n, p in generator.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and found[0]
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_in_memory_is_computed_again_with_the_same_bits():
    generator = generator_of(DECODER_TARGETS)
    samples, images = studies(0, 1, 2)
    whole, none = FrozenStages(generator), FrozenStages(generator, limit=0)
    count = seen_by_first_stage(generator)
    first, second = none.tokens(samples, images), none.tokens(samples, images)
    assert count[0] == 2 * sum(SLICES)
    assert torch.equal(first, second) and torch.equal(first, whole.tokens(samples, images))


def on_disk(samples, folder):
    return [replace(sample, prepared=folder / f"{i:040x}.npy") for i, sample in enumerate(samples)]


def test_the_next_process_finds_the_same_bits_on_disk(tmp_path):
    generator = generator_of(LAST_STAGE)
    samples, images = studies(0, 1)
    samples = on_disk(samples, tmp_path)
    first = FrozenStages(generator).tokens(samples, images)
    files = sorted(tmp_path.iterdir())
    assert sorted(file.name[:40] for file in files) == [f"{i:040x}" for i in range(2)]
    assert all(file.stat().st_mode & 0o077 == 0 for file in files), "pictures of patients: for this user alone"

    count = seen_by_first_stage(generator)
    assert torch.equal(FrozenStages(generator).tokens(samples, images), first) and count[0] == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "other shape"])
def test_a_damaged_file_is_computed_again(tmp_path, damage):
    generator = generator_of(DECODER_TARGETS)
    samples, images = studies(0)
    samples = on_disk(samples, tmp_path)
    plain = FrozenStages(generator).tokens(samples, images)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-40])
    elif damage == "flipped":
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    else:
        store_computed(file, np.zeros((1, 2, 2), np.float32))
    assert torch.equal(FrozenStages(generator).tokens(samples, images), plain)
    assert file.read_bytes() == content


def test_other_weights_have_files_of_their_own(tmp_path):
    samples, images = studies(0)
    samples = on_disk(samples, tmp_path)
    one, other = generator_of(DECODER_TARGETS), generator_of(DECODER_TARGETS)
    with torch.no_grad():
        next(other.encoder.parameters()).mul_(1.5)
    first, second = (FrozenStages(generator).tokens(samples, images) for generator in (one, other))
    assert len(list(tmp_path.iterdir())) == 2 and not torch.equal(first, second)


@pytest.mark.parametrize("change", ["image", "adapter"])
def test_what_was_changed_since_is_seen_anew(tmp_path, change):
    """An image between two tasks of a process, whose prepared file has another name then; an adapter by training."""
    generator = generator_of(LAST_STAGE)
    frozen, (samples, images) = FrozenStages(generator), studies(0)
    before = frozen.tokens(on_disk(samples, tmp_path / "before"), images)
    if change == "image":
        images.images = 255 - images.images
    else:
        with torch.no_grad():
            for name, parameter in generator.named_parameters():
                if ".lora_B." in name:
                    parameter.mul_(2)
    after = frozen.tokens(on_disk(samples, tmp_path / ("after" if change == "image" else "before")), images)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, generator.tokens(images), rtol=1e-5, atol=1e-6)
