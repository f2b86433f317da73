"""A federation of two members and an unseen hospital in one process, from the handshake to drafts of both."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.learning.drafting import Drafter, Study
from fedtar_flare.methods.fedmrg.contract import CONTRACT
from fedtar_flare.methods.fedmrg.events import EVENTS, Bank, Outside
from fedtar_flare.models.outline import outline
from fedtar_flare.protocol.exchange import check_names
from fedtar_flare.protocol.messages import version
from fedtar_flare.record.events import SHARED, End, Evaluation, Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.checkpoint import load
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.site import audit
from fedtar_flare.site.context import home as cache_home
from fedtar_flare.site.state import SiteState
from fedtar_flare.testing import FunctionFederation, Hospital

T = 2
MEMBERS, UNSEEN = ("site-1", "site-2"), "site-3"
SITES = (*MEMBERS, UNSEEN)
SETTINGS = {"model": {"max_length": 10, "num_beams": 1}, "data": {"synthetic_patients": 12}}
SETTINGS |= {"training": {"local_steps": 2, "batch_size": 4, "lr": 1e-2}}


@pytest.fixture(scope="module")
def place(without_site_files, tmp_path_factory):
    return tmp_path_factory.mktemp("run")


class Recording:
    """A hospital that keeps what it sent and was sent."""

    def __init__(self, folder, name):
        self.site = Hospital(folder, name, fresh=False, method="fedmrg", **SETTINGS)
        self.messages = []

    def __call__(self, task, header, weights):
        reply, tensors = self.site.run(task, header, weights)
        self.messages.append(SimpleNamespace(task=task, header=header, down=dict(weights), reply=reply, up=tensors))
        return reply, tensors


@pytest.fixture(scope="module")
def federation(place):
    sites = {name: Recording(place, name) for name in SITES}
    rounds = {"num_rounds": 2, "time_steps": T, "evaluate_every": 2}
    controller = FunctionFederation(place / "whole", sites, "fedmrg", **rounds, unseen=[UNSEEN])
    controller.run()
    assert not controller.panics, controller.panics
    events = read_events(controller.results_folder, (*SHARED, *EVENTS))
    return SimpleNamespace(sites=sites, controller=controller, events=events, results=controller.results_folder)


def state_of(federation, site):
    return SiteState(cache_home() / "state", federation.controller.run_id, site)


def test_one_exchange_a_round_of_the_members_alone_and_an_unseen_hospital_is_only_scored(federation):
    events = federation.events
    assert of_kind(events, End)[-1].status == "completed"
    steps = [(step.round, step.step, tuple(step.sites)) for step in of_kind(events, Step)]
    assert steps == [(1, 1, MEMBERS), (2, 1, MEMBERS)]
    asked = [(m.task, m.header.round, m.header.score) for m in federation.sites[UNSEEN].messages]
    assert asked == [("handshake", 0, "all"), ("close_round", 2, "all")], "in a round without scores it is left alone"
    assert all(m.header.score == "test" for name in MEMBERS for m in federation.sites[name].messages)
    counts = of_kind(events, Start)[0].counts
    final = of_kind(events, Evaluation)[-1]
    for name in SITES:
        splits = counts[name].values() if name == UNSEEN else [counts[name]["test"]]
        assert final.sites[name].all["n"] == sum(sum(values) for values in splits)
    assert final.sites[UNSEEN] == final.generic[UNSEEN], "personal equals generic where nothing personal was trained"
    assert final.sites[MEMBERS[0]] != final.generic[MEMBERS[0]]
    for validation in of_kind(events, Validation):
        assert set(validation.sites) == set(MEMBERS)
    assert of_kind(events, Outside) == [Outside(sites=[UNSEEN])]
    assert state_of(federation, UNSEEN).versions() == [version(0, 0)]


def test_encoder_branch_and_generic_adapter_travel_and_the_specialised_one_never_does(federation):
    travelled = {name for site in federation.sites.values() for m in site.messages for name in (m.up or {})}
    kinds = {"generic" if ".generic." in name else name.partition(".")[0] for name in travelled}
    assert kinds == {"generic", "encoder", "pooling", "projection", "diagnosis", "bank"}
    private = state_of(federation, MEMBERS[0]).read(version(2, 1))[0]
    specialised = {n: v for n, v in private.items() if n.startswith("specialised/")}
    assert all(".specialised." in name for name in specialised)
    outside = b"".join(path.read_bytes() for path in sorted(federation.results.rglob("*")) if path.is_file())
    for message in (m for site in federation.sites.values() for m in site.messages):
        outside += b"".join(value.contiguous().numpy().tobytes() for value in (message.up or {}).values())
    for name, value in specialised.items():
        if ".lora_B." in name:
            assert value.any() and value.contiguous().numpy().tobytes() not in outside, name


def test_the_contract_lets_no_specialised_factor_pass():
    shape = (2, 3)
    task = CONTRACT.task("train")
    layer = "base_model.model.decoder.transformer.h.0.mlp.c_fc.lora_A"
    check_names(CONTRACT, task, {f"{layer}.generic.weight": shape})
    for name in (f"{layer}.specialised.weight", f"{layer}.broadcast.weight", f"{layer}.weight", "encoder.x"):
        with pytest.raises(ExchangeError, match="not allowed to leave"):
            check_names(CONTRACT, task, {name: shape})


def test_rows_go_up_bounded_and_down_to_all_members_without_their_origin(federation):
    """In round 1 there is none to send down; in round 2 all get the same rows, and leave out their own."""
    of_round = [[federation.sites[name].messages[i] for name in MEMBERS] for i in (1, 3)]
    up = [[m.up["bank.features"] for m in messages] for messages in of_round]
    assert all(m.task == "train" and m.header.round == r for r, ms in zip((1, 2), of_round, strict=True) for m in ms)
    assert all("bank.features" not in m.down for m in of_round[0])
    down = [m.down["bank.features"] for m in of_round[1]]
    assert torch.equal(*down) and len(down[0]) == sum(map(len, up[0]))
    sent = torch.cat(up[0])
    assert torch.equal(down[0].sort(0).values, sent.sort(0).values) and not torch.equal(down[0], sent)
    assert not any("bank.features" in m.down for m in federation.sites[UNSEEN].messages)
    assert not any("bank.features" in m.down for name in MEMBERS for m in federation.sites[name].messages[2:3])
    events = of_kind(federation.events, Bank)
    assert [(event.round, event.rows) for event in events] == [(1, 0), (2, len(down[0]))]
    for event, rows in zip(events, up, strict=True):
        for i, name in enumerate(MEMBERS):  # the paper's row of one patient gives the patient away
            received = 0 if event.round == 1 else len(up[0][1 - i])
            numbers = {"sent": len(rows[i]), "received": received, "patients_a_row": 1, "membership_auc": 1.0}
            assert event.sites[name] == numbers
    assert audit._tensor("bank.features", down[0], CONTRACT)["personal"] is True


def test_rows_of_another_width_than_most_sites_have_are_refused():
    run = FederatedController("fedmrg", num_rounds=1, time_steps=T)
    run.membership.members, run.strategy._round = ["a", "b", "c"], 1
    run.membership.described = {name: {"feature_width": width} for name, width in zip("abc", (4, 4, 3), strict=True)}
    row = torch.eye(4)[:1]
    run.strategy.collect("a", {"bank.features": row})
    with pytest.raises(ExchangeError, match="rows of width 3"):
        run.strategy.collect("c", {"bank.features": row[:, :3]})
    assert torch.equal(run.strategy.bank.rows(2), row)


def test_a_site_that_shares_no_row_still_uses_those_of_others(place):
    site = Recording(place / "other", "site-1").site
    site.executor.strategy._shares_features = lambda task: False
    _, w = site.handshake("no-rows")
    rows = torch.eye(32)[:5]
    reply, update = site.train({**w, "bank.features": rows}, 2, 1, "no-rows")
    assert reply.status == "ok" and "bank.features" not in update
    assert reply.payload["bank"] == {"sent": 0.0, "received": 5.0}
    assert torch.equal(site.executor.strategy.learner.bank.rows, rows)


def test_a_member_drafts_with_both_adapters_and_a_stranger_with_the_generic_one(federation):
    adapter = federation.results / "adapter"
    info = json.loads((adapter / "fedtar.json").read_text())
    assert info["adapter"] == "generic" and info["extension"]["labeler"] == "synthetic"
    learner = federation.sites[MEMBERS[0]].site.executor.strategy.learner
    learner.load_shared(load(federation.results / "checkpoint" / "best.safetensors").weights)
    state = state_of(federation, MEMBERS[0])
    learner.load_private(state.read(version(info["round"], 1))[0])
    sample = learner.cohort.samples("test")[0]
    images = learner.images([sample])
    study = Study(sample.visit.image, "ct")
    for folder, personal in ((None, False), (state.folder, True)):
        drafter = Drafter(adapter, state=folder, device="cpu")
        assert drafter.draft(study).text == learner.generate([sample], images, personal)[0]
        with torch.no_grad():
            losses = [one.report_losses([sample], images, personal) for one in (drafter.site_model, learner)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="has no specialised adapter"):
        Drafter(adapter, state=state_of(federation, UNSEEN).folder, device="cpu")


def test_what_travels_is_the_paper_s_59_million_values(tmp_path):
    """4.7 TB for 10 sites over 1,000 rounds both ways, as the paper's communication cost; the bank apart."""
    shutil.copy(Path(__file__).with_name("llama_2_7b.json"), tmp_path / "config.json")
    model = {"decoder_name": str(tmp_path), "tokenizer": "small", "weights": "random"}
    strategy = MethodRecipe("fedmrg", preset="fedmrg-paper", model=model).executor.strategy
    made_of, lora = outline(strategy.settings.model, strategy.extend), strategy.settings.lora
    factors = made_of.lora_values(strategy.settings.model.lora_targets, lora.rank)
    whole = made_of.exchanged(lora.exchange)
    values = dict.fromkeys(("encoder", "projection", "diagnosis"), 0)
    for name in whole:
        values[name.partition(".")[0]] += made_of.tensors[name]
    assert factors == 2 * 32 * 16 * (4096 + 4096) == 8_388_608
    assert values == {"encoder": 42_500_160 - 9_408, "projection": 8_388_608, "diagnosis": 56 * 2049 + 4 * 4096}
    total = factors + sum(values.values())
    assert total == 59_399_096 and round(2 * 10 * 1000 * 4 * total / 1e12, 1) == 4.8
    assert not [name for name in whole if name in made_of.barred], "neither pixels nor words one by one"
    layers = made_of.targeted(strategy.settings.model.lora_targets)
    assert len(layers) == 64 and {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"}
    assert lora.alpha / lora.rank == 1.0
