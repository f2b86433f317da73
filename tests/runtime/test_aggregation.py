"""Weights of the sites, and the mean of their updates: order, memory, disk."""

import gc
import math
import weakref
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.protocol.contract import TRAIN
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import read_events
from fedtar_flare.runtime import aggregation
from fedtar_flare.runtime.aggregation import FEWEST_SITES, SpilledUpdates, limited_shares, site_weights
from fedtar_flare.testing import FunctionFederation, QuadraticSite, random_pair

SHAPES = {"a": (4, 3), "b": (5,), "c": ()}


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    made["a"] = made["a"].T.contiguous().T  # in memory column by column
    return {name: value.to(dtype) for name, value in made.items()}


def robust(aggregation, columns, shares):
    """Of one value at each site that says something, by sites: what the papers write down."""
    values = sorted(columns.values())
    if aggregation in ("mean", "norm_bounded_mean"):
        return sum(shares[site] * value for site, value in columns.items()) / sum(shares[site] for site in columns)
    cut = max(1, int(0.2 * len(values))) if aggregation == "trimmed_mean" else (len(values) - 1) // 2
    kept = values[cut : len(values) - cut]
    return sum(kept) / len(kept) if len(values) >= 3 else 0.0


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=12),
    st.sampled_from(sorted(FEWEST_SITES)),
    st.sampled_from([1, 7, 2**20]),
    st.sampled_from([0, 150, 2**20]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.randoms(),
)
def test_aggregations_are_those_of_the_papers_row_by_row_and_the_mean_s_bits_those_of_any_order_of_arrival_and_place(
    tmp_path_factory, said, aggregation_name, block, memory, dtype, random
):
    updates = {f"../site-{k}": tensors(k, dtype) for k in range(len(said))}  # no names of files
    for update, row in zip(updates.values(), said, strict=True):
        update["a"][~torch.tensor(row)] = 0
    shares = site_weights(dict(zip(updates, range(1, 20), strict=False)))

    def aggregated(order, block, memory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(aggregation, "IN_MEMORY", memory)
            patch.setattr(aggregation, "BLOCK", block)
            folder = tmp_path_factory.mktemp("run")
            with SpilledUpdates(folder / "updates", SHAPES, by_rows=["a"]) as spilled:
                for site in order:
                    spilled.add(site, updates[site])
                assert [*folder.iterdir()] == [folder / "updates"]
                return spilled.aggregate(aggregation_name, shares)

    found = aggregated(random.sample([*updates], len(updates)), block, memory)
    if aggregation_name == "mean":
        again = aggregated(updates, 2**20, 2**20)
        assert all(torch.equal(value, again[name]) for name, value in found.items())
    norms = {s: math.sqrt(sum(float(v.double().square().sum()) for v in u.values())) for s, u in updates.items()}
    bound = sorted(norms.values())[(len(norms) - 1) // 2] if aggregation_name == "norm_bounded_mean" else math.inf
    flat = {s: {n: min(1, bound / norms[s]) * v.double().reshape(-1) for n, v in u.items()} for s, u in updates.items()}
    for name, shape in SHAPES.items():
        for i, value in enumerate(found[name].reshape(-1)):
            row = i // 3 if name == "a" else None
            heard = [s for s, says in zip(updates, said, strict=True) if row is None or says[row]]
            expected = robust(aggregation_name, {s: float(flat[s][name][i]) for s in heard}, shares) if heard else 0.0
            assert float(value) == pytest.approx(expected, rel=1e-9, abs=1e-9), (name, shape)


@given(st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=1, max_size=8).filter(sum), st.floats(0.01, 1))
def test_no_share_is_above_the_ceiling_and_the_others_keep_their_ratios(sizes, most):
    shares = {f"site-{k}": size / sum(sizes) for k, size in enumerate(sizes)}
    found, ceiling = limited_shares(shares, most), max(most, 1 / len(shares))
    assert math.fsum(found.values()) == pytest.approx(1) and max(found.values()) <= ceiling * (1 + 1e-6)
    assert found == shares or max(shares.values()) > ceiling
    free = [site for site in found if 0 < found[site] < ceiling * (1 - 1e-6) and shares[site] > 1e-12]
    for site in free[1:]:
        assert found[site] / found[free[0]] == pytest.approx(shares[site] / shares[free[0]], rel=1e-6)


def test_updates_beyond_what_memory_may_hold_wait_on_disk_and_the_folder_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(aggregation, "IN_MEMORY", 0)
    folder = tmp_path / "run" / "updates"
    folder.mkdir(parents=True)
    (folder / "left-over.safetensors").write_bytes(b"of a killed run")
    with pytest.raises(RuntimeError), SpilledUpdates(folder, SHAPES) as spilled:
        assert not list(folder.iterdir())
        spilled.add("site", tensors(0))
        assert len(list(folder.iterdir())) == 1
        raise RuntimeError
    assert not folder.exists() and folder.parent.exists()


def test_an_update_that_is_half_written_or_lost_its_end_is_never_summed(tmp_path, monkeypatch):
    monkeypatch.setattr(aggregation, "IN_MEMORY", 0)
    written = [aggregation._bytes_of(tensors(0)["a"]), OSError("no space left")]
    with SpilledUpdates(tmp_path / "updates", SHAPES) as spilled:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(aggregation, "_bytes_of", Mock(side_effect=written))
            spilled.add("site-a", tensors(0))
        with pytest.raises(KeyError):
            spilled.mean({"site-a": 1.0})
        spilled.add("site-a", tensors(1))
        assert torch.equal(spilled.mean({"site-a": 1.0})["a"], tensors(1)["a"].double())
        (file,) = (tmp_path / "updates").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(OSError, match="no longer whole"):
            spilled.mean({"site-a": 1.0})


def test_the_server_holds_no_update_of_a_site_that_has_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(aggregation, "IN_MEMORY", 0)  # these updates stand for large ones, which wait on disk
    sent, held = [], []

    class Watching(QuadraticSite):
        def __call__(self, task, header, weights):
            gc.collect()
            held.append(sum(update() is not None for update in sent))
            reply, tensors = super().__call__(task, header, weights)
            sent.extend(map(weakref.ref, tensors.values()) if task == TRAIN else ())
            return reply, tensors

    sites = {name: Watching(name, [random_pair(1)] * 2) for name in "abcdef"}
    controller = FunctionFederation(tmp_path, sites, num_rounds=1, time_steps=2)
    controller.run()
    assert not controller.panics and len(sent) == 2 * 6 * 2 and max(held) <= 2, "that of the last site alone"
    steps = [event for event in read_events(controller.results_folder) if isinstance(event, Step)]
    assert [len(step.sites) for step in steps] == [6, 6]
    assert not (controller.results_folder / "updates").exists()  # nor does the disk keep them
