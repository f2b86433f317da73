"""FedKEI's server with sites that are plain functions: its pool, messages, resume, sites that leave or misbehave."""

import shutil

import pytest
import torch

from fedtar_flare.methods.fedkei.config import PLANS
from fedtar_flare.methods.fedkei.contract import ADAPT, IMPORTANCE, PROBE, PULL
from fedtar_flare.methods.fedkei.events import EVENTS, Learnt, Mixed
from fedtar_flare.methods.fedkei.mixing import Layout
from fedtar_flare.protocol.contract import HANDSHAKE
from fedtar_flare.protocol.messages import ERROR, LEFT, Reply, abstain, ok
from fedtar_flare.record.events import SHARED, End, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.testing import FunctionFederation, QuadraticSite

SHAPES = {"base_model.model.x.lora_A.weight": (2, 3), "base_model.model.x.lora_B.weight": (3, 2)}
SHAPES |= {"head.bias": (2,), "head.weight": (2, 3)}
TASKS = ["one", "two", "three", "four"]
SITES = ("site-1", "site-2", "site-3")


def drawn(*seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return {name: torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}


START = drawn(7)


class Site(QuadraticSite):
    """Answers with numbers that its name, the task and what came down decide; keeps what came down.

    ``sendable``: FLARE fetches tensors by safetensors, which refuses slices and transposes.
    """

    def __init__(self, name, without=(), leaves_at=99, spoil=lambda task, r, tensors: tensors):
        super().__init__(name, [], samples=4)
        self.without, self.leaves_at, self.spoil, self.sendable = without, leaves_at, spoil, True

    def start(self):
        return dict(START)

    def __call__(self, task, header, weights):
        number = int(self.name[-1])
        if task == HANDSHAKE:
            reply, start = super().__call__(task, header, weights)
            del reply.payload["adapter_config"]
            reply.payload["model"] |= {"fingerprint": "f", "config": {"encoder": "tiny"}}
            return reply, start
        if header.round >= self.leaves_at:
            return Reply(ERROR, header.round, header.step, LEFT, method="fedkei"), None
        if header.round in self.without:
            return abstain(header, "no training image"), None
        self.sendable &= all(value.is_contiguous() for value in weights.values())
        self.received[task, header.round] = {name: value.clone() for name, value in weights.items()}
        shapes = {name: tuple(value.shape[0 if task == PROBE else 1 :]) for name, value in weights.items()}
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(PULL)}
        tensors = drawn(number, header.round, task == PROBE, shapes=shapes)
        tensors = {name: value + 0.1 * weights[name].mean() for name, value in tensors.items()}
        tensors = {name: value.abs() if name.startswith(IMPORTANCE) else value for name, value in tensors.items()}
        scores = {"n": 4, "auc": [0.5, 0.6 + 0.1 * number], "rand_auc": [0.5, 0.6]}
        payload = {"counts": {"task": header.round, "train": [4, 4]}, "scores": scores} if task == ADAPT else {}
        return ok(header, {"samples": 8}, payload), self.spoil(task, header.round, tensors)


def run(folder, sites=None, rounds=3, fedkei=None, **more):
    more |= {"num_rounds": rounds, "time_steps": 2, "fedkei": {"tasks": TASKS, "clusters": 2, **(fedkei or {})}}
    sites = {site.name: site for site in sites or map(Site, SITES)}
    (controller := FunctionFederation(folder, sites, "fedkei", **more)).run()
    return controller, read_events(controller.results_folder, (*SHARED, *EVENTS))


def owners(controller):
    return {m.site for m in controller.strategy.pool.modules}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    sites = [Site(name) for name in SITES]
    controller, events = run(folder, sites)
    assert not controller.panics, controller.panics
    return folder, sites, controller, events


def test_the_first_task_starts_from_the_common_start_and_later_ones_from_probed_clusters(whole):
    _, sites, controller, events = whole
    sent = [(task, r) for task, site, r, _ in controller.sent if site == "site-1"]
    assert sent == [(HANDSHAKE, 0), (ADAPT, 1), (PROBE, 2), (ADAPT, 2), (PROBE, 3), (ADAPT, 3)]
    first = sites[0].received[ADAPT, 1]
    assert all(site.sendable for site in sites)
    assert all(torch.equal(first[name], START[name][None]) for name in START)
    before, adapted = (sites[1].received[task, 3] for task in (PROBE, ADAPT))
    assert all(value.shape == (2, *SHAPES[name]) for name, value in before.items())
    assert any(not torch.equal(before[name], adapted[name]) for name in before), "the outer step moved the centres"
    mixed = of_kind(events, Mixed)
    told = [(event.round, event.modules, sorted(event.probed)) for event in mixed]
    assert told == [(1, 0, []), (2, 3, [*SITES]), (3, 6, [*SITES])]
    assert not mixed[0].clusters and len(mixed[2].clusters) == 4, "two centres of adapters, two of heads"
    learnt = of_kind(events, Learnt)
    assert [event.sites["site-3"].task for event in learnt] == TASKS[:3]
    assert controller.strategy.numbers()["auc"] == [pytest.approx(0.8)] * 3
    steps = [(event.round, event.step, event.bytes_up > 0) for event in of_kind(events, Step)]
    assert steps == [(1, 2, True), (2, 1, True), (2, 2, True), (3, 1, True), (3, 2, True)]


def test_a_resumed_run_may_have_more_tasks_and_no_other_settings(whole, tmp_path):
    folder, *_ = whole
    kept = shutil.copytree(folder / "fedtar" / "checkpoint", tmp_path / "kept")
    longer, events = run(tmp_path / "b", rounds=4, resume_from=str(kept))
    assert not longer.panics and [one.round for one in of_kind(events, Learnt)] == [4]
    other, _ = run(tmp_path / "c", fedkei={"eta_out": 0.5}, resume_from=str(kept))
    assert "other settings" in other.panics[0]


def test_a_site_that_leaves_takes_its_modules_with_it(tmp_path):
    sites = [Site("site-1"), Site("site-2", leaves_at=3), Site("site-3")]
    controller, events = run(tmp_path, sites)
    assert not controller.panics and owners(controller) == {"site-1", "site-3"}
    mixed = of_kind(events, Mixed)[2]
    members = {member["site"] for cluster in mixed.clusters for member in cluster["members"]}
    assert mixed.left == ["site-2"] and members == {"site-1", "site-3"} and mixed.modules == 4


def test_a_site_without_a_task_abstains_and_gets_the_pool_at_the_next(tmp_path):
    sites = [Site("site-1"), Site("site-2", without=(1,))]
    controller, events = run(tmp_path, sites, rounds=2)
    assert not controller.panics and [event.modules for event in of_kind(events, Mixed)] == [0, 1]
    assert all(len(value) == 1 for value in sites[1].received[ADAPT, 2].values()), "a pool of one is one centre"
    idle, nothing = run(tmp_path / "idle", [Site("site-1", without=(1, 2, 3))])
    assert not idle.panics and not idle.strategy.pool.modules
    reason = "No site learnt anything, so there is nothing new to use (site-1: no training image)"
    assert [of_kind(each, End)[-1].reason for each in (events, nothing)] == ["", reason]


SPOILED = {
    "has shape": (ADAPT, lambda sent: {name: value[:1] for name, value in sent.items()}),
    "times that of the weights": (ADAPT, lambda sent: {name: 1e6 * value for name, value in sent.items()}),
    "importance": (ADAPT, lambda sent: {n: -value if n.startswith(IMPORTANCE) else value for n, value in sent.items()}),
    "in task 'probe'": (PROBE, lambda sent: {name: value[0] for name, value in sent.items()}),
}


@pytest.mark.parametrize("words", SPOILED)
def test_a_module_or_gradient_that_does_not_fit_is_refused_and_the_task_goes_on(tmp_path, words):
    spoilt, change = SPOILED[words]
    bad = Site("site-2", spoil=lambda task, r, sent: change(sent) if task == spoilt else sent)
    plan, rounds = "fedcurv" if words == "importance" else "fedkei", 2 if spoilt == PROBE else 1
    controller, events = run(tmp_path, [Site("site-1"), bad, Site("site-3")], rounds=rounds, fedkei={"plan": plan})
    assert not controller.panics and words in of_kind(events, Step)[rounds - 1].refused["site-2"]
    senders = of_kind(events, Mixed)[1].probed if spoilt == PROBE else owners(controller)
    assert sorted(senders) == ["site-1", "site-3"]


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_runs_and_its_centres_are_those_of_its_mixture(tmp_path, name):
    sites = [Site(site) for site in SITES]
    controller, events = run(tmp_path, sites, fedkei={"plan": name})
    assert not controller.panics and len(controller.strategy.pool.modules) == 9
    assert any(event.step == 1 for event in of_kind(events, Step)) is (PLANS[name].probe != "none")
    for site in sites:
        assert all(torch.equal(site.received[ADAPT, 1][name], START[name][None]) for name in START)
        down = site.received[ADAPT, 3]
        Layout.of(START).columns({n: value for n, value in down.items() if not n.startswith((IMPORTANCE, PULL))})
        assert (len(down) > len(START)) is (name == "fedcurv")
    if name == "rand":
        assert torch.equal(sites[0].received[ADAPT, 3]["head.bias"], START["head.bias"][None])


def test_fedcurv_s_sums_are_those_of_the_latest_modules_and_survive_a_restart(tmp_path):
    sites = [Site(name) for name in SITES]
    plan = {"plan": "fedcurv"}
    controller, _ = run(tmp_path / "a", sites, rounds=2, fedkei=plan)
    again, _ = run(tmp_path / "b", sites, fedkei=plan, resume_from=str(controller.results_folder / "checkpoint"))
    assert not controller.panics and not again.panics
    down, modules = sites[0].received[ADAPT, 3], controller.strategy.pool.last(3)
    assert len(modules) == 3
    for name in START:
        total = sum(m.importance[name] for m in modules)
        pull = sum(m.importance[name] * m.tensors[name] for m in modules)
        torch.testing.assert_close(down[IMPORTANCE + name][0], total)
        torch.testing.assert_close(down[PULL + name][0], pull)
    first = sites[0].received[ADAPT, 1]
    assert not any(first[prefix + name].any() for name in START for prefix in (IMPORTANCE, PULL))
    held, before = (one.strategy.pool.state()[0].keys() for one in (again, controller))
    assert held > before
