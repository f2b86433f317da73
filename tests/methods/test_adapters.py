"""Adapters at a site: of a lower rank than the job's, and FedAvg of other parts than LoRA."""

import pytest
import torch
from batches import noise
from hospital_site import T, loss_differences, state_of

from fedtar_flare.methods.fedpeft import METHOD, extend
from fedtar_flare.models.adapters.lora import shared_parameters
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import preset
from fedtar_flare.protocol.exchange import check_names, factor, padded, sent_shapes
from fedtar_flare.protocol.messages import version
from fedtar_flare.testing import Hospital

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


KINDS = ("adalora", "vera", "loha", "prompt", "prefix", "none")
MAPS = ["encoder.*", "pooling.*", "projection.*", "!*embedding*"]
MODEL = preset("tiny", max_length=12)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_what_it_sends_and_nothing_else(hospital, kind):
    lora = {"exchange": MAPS} if kind == "none" else {}
    site, reply, w = hospital(method="fedpeft", fresh=False, peft={"kind": kind}, lora=lora, **SMALL)
    learner = site.executor.strategy.learner
    before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
    trained, update = site.train(w, 1, 1)
    assert trained.status == "ok" and any(bool(v.any()) for v in update.values())
    shared = {id(p) for p in shared_parameters(learner.model).values()}
    for name, parameter in learner.model.named_parameters():
        assert id(parameter) in shared or torch.equal(parameter, before[name]), name
    maps = [n for n in update if n.startswith(("encoder.", "pooling.", "projection."))]
    assert bool(maps) is (kind == "none") and len(maps) in (0, len(update))
    check_names(METHOD.contract, METHOD.contract.task("train"), {n: v for n, v in update.items() if n not in maps})
    assert bool(reply.payload["adapter_config"]) is (kind in ("adalora", "vera", "loha"))
    closing, _ = site.close({n: w[n] + update[n] for n in w}, 1, evaluate=True)
    assert closing.numbers["validation_loss"] > 0 and closing.payload["scores"]


def test_adalora_s_penalty_is_that_of_factors_that_are_not_orthonormal(hospital):
    site, _, w = hospital(method="fedpeft", fresh=False, peft={"kind": "adalora"}, **SMALL)
    learner = site.executor.strategy.learner
    factors = {n: p for n, p in shared_parameters(learner.model).items() if n[-1] in "AB"}
    assert len(factors) * 3 == len(w) * 2
    for parameter in factors.values():
        parameter.grad = None
    learner.after_backward({})
    for name, parameter in factors.items():
        rows = parameter.detach().double() if name.endswith("A") else parameter.detach().double().T
        excess = rows @ rows.T - torch.eye(len(rows), dtype=torch.float64)
        by_hand = 0.5 / len(factors) * 2 * excess @ rows / excess.norm()
        wanted = by_hand if name.endswith("A") else by_hand.T
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("training", [{"local_steps": 2}, {"local_epochs": 2.0}])
def test_adalora_is_pruned_to_its_target_within_a_task_and_begins_anew_in_the_next(hospital, training):
    """Within a task's own number of updates, of which the adapter's description says nothing."""
    settings = {"peft": {"kind": "adalora"}, "lora": {"rank": 2}, "training": {"batch_size": 4, **training}}
    site, reply, w = hospital(method="fedpeft", fresh=False, **settings)
    for round_ in (1, 2):
        _, update = site.train(w, round_, 1)
        w = {n: w[n] + update[n] for n in w}
        values = [w[n] for n in w if n.endswith("lora_E")]
        left = sum(int((v != 0).sum()) for v in values)
        assert 0 < left <= len(values), "at most one entry a layer, in the mean"
        assert site.executor.strategy.learner.adapter_config() == reply.payload["adapter_config"]


def test_prefix_tuning_replaces_the_words_states_before_every_layer():
    """What the last layer's words are follows from their own states there, not from those of the layer before."""
    model = build_model(MODEL)
    extend(model, {"kind": "prefix", "prompts": 3, "targets": "", "seed": 1})
    ids = torch.tensor([[model.bos_id, 5, 6], [model.bos_id, 7, 8]])
    with torch.no_grad():
        encoded, words = model.encoded(noise()), []
        hook = model.decoder.transformer.h[1].register_forward_pre_hook(lambda m, args: words.append(args[0]))
        model.decode(*model.memory(noise(), encoded), ids, model.prompts(encoded))
        hook.remove()
    assert torch.equal(words[0][:, :3], model.diagnosis.states[0].expand(2, -1, -1))
    assert len(model.diagnosis.states) == MODEL.decoder_config["n_layer"] - 1
