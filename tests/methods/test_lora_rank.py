"""A site whose file lowers the rank of its adapter, beside a site of the job's rank."""

import pytest
import torch
from hospital_site import T, loss_differences, state_of

from fedtar_flare.protocol.exchange import factor, padded, sent_shapes
from fedtar_flare.protocol.messages import version
from fedtar_flare.record.events import Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.testing import FunctionFederation, Hospital, same_bits
from fedtar_flare.testing import last_checkpoint as last

SMALL = {"model": {"max_length": 8, "num_beams": 1}}


def with_rank(folder, rank):
    (folder / "sites" / "site-1.yaml").write_text(
        f"source: synthetic\nstate_dir: {folder / 'state'}\nlora_rank: {rank}\n"
    )


@pytest.mark.parametrize("form", ["factors", "ffa"])
def test_the_site_sees_sends_and_differentiates_its_own_ranks(hospital, tmp_path, form):
    lora = {"lora": {"mean": form}, "patient": {"local_adapter": True}, **SMALL}
    whole, start = Hospital(tmp_path, "hospital", **lora).handshake("whole")
    with_rank(tmp_path, 2)
    site, reply, w = hospital(fresh=False, **lora)
    assert reply.numbers["rank"] == 2 and "rank" not in whole.numbers
    assert all(torch.equal(w[n], start[n]) for n in start), "the start is the seed's, of the job's rank"
    for what in ("schema", "settings", "adapter_config", "model"):
        assert reply.payload[what] == whole.payload[what]
    ws = [w]
    for t in range(1, T + 1):
        trained, update = site.train(ws[-1], 1, t)
        assert trained.status == "ok", trained.reason
        shapes = {n: tuple(value.shape) for n, value in update.items()}
        assert shapes == sent_shapes({n: tuple(v.shape) for n, v in w.items()}, 2, frozen_a=form == "ffa")
        assert max(float(value.abs().max()) for value in update.values()) > 0
        ws.append({n: ws[-1][n] + 0.5 * value for n, value in padded(update, ws[-1]).items()})
    closed, _ = site.close(ws[-1], 1, evaluate=True)
    learner = site.executor.strategy.learner
    assert learner.patient.rank == learner.lora_rank == 2 and set(closed.payload["scores"])
    assert closed.payload["t_numbers"] == pytest.approx(loss_differences(learner, ws), rel=0.05, abs=1e-4)
    local = {n for n in state_of(tmp_path).read(version(1, T))[0] if n.startswith("local/")}
    assert local == {f"local/{n}" for n in w}
    with_rank(tmp_path, 3)
    refused, _ = site.handshake(initial_site="", after=version(1, T), member=True)
    assert "lora_rank was another at the run's first handshake: 2" in refused.reason


def test_a_run_of_products_goes_on_to_the_same_bits_and_its_gap_is_recorded(hospital, tmp_path):
    with_rank(tmp_path, 2)
    settings = {"lora": {"mean": "product"}, **SMALL}
    sites = {n: Hospital(tmp_path, n, fresh=False, **settings).run for n in ("hospital", "site-1")}

    def run(folder, **more):
        controller = FunctionFederation(folder, sites, num_rounds=2, time_steps=T, evaluate_every=2, **more)
        controller.run()
        assert not controller.panics, controller.panics
        return controller

    whole = run(tmp_path / "whole")
    steps = of_kind(read_events(whole.results_folder), Step)
    assert all(not step.refused and step.update_norm > 0 for step in steps)
    end = last(whole)
    (whole.results_folder / "checkpoint" / "round-0002.safetensors").unlink()
    again = run(tmp_path / "again", resume_from=str(whole.results_folder / "checkpoint"))
    assert same_bits(end, last(again))


def test_noise_of_dp_sgd_leaves_a_frozen_a_alone(hospital):
    training = {"noise_multiplier": 1.0, "local_steps": 2, "batch_size": 4}
    site, _, w = hospital(method="fedavg", fresh=False, lora={"mean": "ffa"}, training=training)
    _, update = site.train(w, 1, 1)
    assert {factor(n) for n in update} == {"B"}
    after = site.executor.strategy.learner.shared()
    assert all(torch.equal(after[n], w[n]) for n in w if factor(n) == "A")


def test_a_method_that_adds_up_factors_in_its_own_way_refuses_a_lower_rank(hospital, tmp_path):
    with_rank(tmp_path, 2)
    _, reply, _ = hospital(method="scaffold")
    assert "lora_rank: the site file has 2, the job 4: method 'scaffold'" in reply.reason
