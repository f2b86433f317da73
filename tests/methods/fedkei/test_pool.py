"""The pool: order, leaving, checkpoints, refusals."""

import json

import pytest
import torch
from made_up_pool import NAMES, pool_of, random_module, same

from fedtar_flare.errors import ExchangeError
from fedtar_flare.methods.fedkei.pool import Pool
from fedtar_flare.tensor_file import read_tensors, write_tensors


def test_modules_are_ordered_by_task_and_site_whenever_they_came():
    one, other = (
        pool_of(),
        pool_of(order=[("site-2", 2), ("site-3", 1), ("site-1", 2), ("site-2", 1), ("site-3", 2), ("site-1", 1)]),
    )
    assert [(m.task, m.site) for m in one.modules] == [(t, f"site-{i}") for t in (1, 2) for i in (1, 2, 3)]
    assert all(same(a.tensors, b.tensors) for a, b in zip(one.modules, other.modules, strict=True))
    assert torch.equal(one.matrix("adapter", one.modules), other.matrix("adapter", other.modules))


def test_a_module_is_the_start_plus_what_was_sent():
    pool, sent = Pool(random_module(1)), random_module(2)
    pool.add("a", 1, sent)
    assert all(torch.equal(pool.modules[0].tensors[name], pool.start[name] + sent[name]) for name in NAMES)
    assert torch.equal(pool.matrix("head", pool.modules)[:, 0], pool.layout.vectors(pool.modules[0].tensors)["head"])


def test_last_before_and_leaving():
    pool = pool_of(sites=2, tasks=3, order=[("site-1", 1), ("site-2", 1), ("site-1", 2), ("site-1", 3), ("site-2", 3)])
    assert [(m.site, m.task) for m in pool.last(3)] == [("site-1", 2), ("site-2", 1)]
    assert len(pool.before(3)) == 3 and pool.before(1) == () == pool.last(1)
    assert pool.leave("site-1") == 3 and pool.sites == ("site-2",) and pool.leave("site-1") == 0


def test_a_checkpoint_gives_the_same_bits(tmp_path):
    pool = pool_of()
    tensors, info = pool.state()
    write_tensors(tmp_path / "pool", {f"w.{name}": value for name, value in tensors.items()}, {"pool": info})
    read, read_info = read_tensors(tmp_path / "pool")
    again = Pool(pool.start)
    again.load(
        {name.removeprefix("w."): value for name, value in read.items()}, json.loads(json.dumps(read_info["pool"]))
    )
    assert [(m.site, m.task) for m in again.modules] == [(m.site, m.task) for m in pool.modules]
    assert all(same(a.tensors, b.tensors) for a, b in zip(again.modules, pool.modules, strict=True))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"head.bias": torch.tensor([float("nan"), 0])}, "head.bias.*not finite"),
        ({"head.bias": torch.zeros(3)}, "head.bias"),
        ({"head.extra": torch.zeros(3)}, "head.extra"),
        ({"base_model.model.encoder.a.qkv.lora_A.weight": torch.zeros(4, 6)}, "lora_A"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_not_kept(change, said):
    pool = Pool(random_module(1))
    with pytest.raises(ExchangeError, match=said):
        pool.add("a", 1, random_module(2) | change)
    assert not len(pool)
    tensors, info = pool_of().state()
    del tensors["1.head.bias"]
    with pytest.raises(ExchangeError, match=r"head\.bias"):
        pool.load(tensors, info)
    assert not len(pool)
