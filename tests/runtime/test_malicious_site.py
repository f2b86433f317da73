"""Attempts of a site that lies to the server: what was tried, and what the run makes of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from federation import Spoilt, pair
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

from fedtar_flare.core.files import coarse_checksums, coarsely_equal
from fedtar_flare.protocol import exchange as wire
from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.record.events import Alarm, End, Late, Start, Step, Validation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.aggregation import FEWEST_SITES
from fedtar_flare.runtime.results import Results
from fedtar_flare.testing import FunctionFederation, QuadraticSite, same_bits
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.testing.federation import NAMES


def federation(folder, *others, num_rounds=2):
    sites = [QuadraticSite("site-a", [pair(1), pair(2)], samples=3, validation=pair(9)), *others]
    settings = {"num_rounds": num_rounds, "time_steps": 2, "step_time_limit": 1}
    return FunctionFederation(folder, {site.name: site for site in sites}, **settings)


def run(controller):
    controller.run()
    return read_events(controller.results_folder)


def answer(**fields):
    return lambda header, reply, tensors: (replace(reply, **fields), tensors)


def payload(**changes):
    return lambda header, reply, tensors: (replace(reply, payload={**reply.payload, **changes}), tensors)


def numbers(**changes):
    return lambda header, reply, tensors: (replace(reply, numbers={**reply.numbers, **changes}), tensors)


def update(make):
    return lambda header, reply, tensors: (reply, make(tensors))


def many(number):
    return {f"t{i}": torch.zeros(1) for i in range(number)}


def test_a_late_answer_to_a_task_that_is_none_is_not_recorded(tmp_path):
    controller = federation(tmp_path)
    run(controller)
    for task in (TRAIN, "line\nanother line", "x" * 1_000_000, ["list"]):
        controller.process_result_of_unknown_task(SimpleNamespace(name="site-a"), task, "id", None, None)
    assert [late.task for late in of_kind(read_events(controller.results_folder), Late)] == [TRAIN]


FOREIGN = dict(zip(NAMES, pair(7), strict=True))
ERROR = {"status": "error", "reason": "x", "payload": {"scores": {}}}
FINDINGS = {f"f{i}": {"n": 1} for i in range(101)}
SHAPES = {f"t{i}": [1] for i in range(20_001)}
CHANGES = {"reply": answer, "payload": payload, "numbers": numbers}
ATTEMPTS = [(task, CHANGES[part](**of), words) for task, part, of, words in cases(__file__, "attempts.yaml").values()]
ATTEMPTS += [
    (TRAIN, update(lambda u: many(20_001)), "the limit is 20000"),
    (HANDSHAKE, payload(schema=SHAPES), "the limit is 20000"),
    (HANDSHAKE, update(lambda u: FOREIGN), "nobody had"),
    (TRAIN, update(lambda u: {**u, "x": torch.ones(1)}), "not agreed on"),
    (TRAIN, update(lambda u: dict(list(u.items())[1:])), "missing"),
    (TRAIN, update(lambda u: {n: torch.ones(9, 9) for n in u}), "shape"),
    (TRAIN, update(lambda u: {n: v / 0 for n, v in u.items()}), "finite"),
    (TRAIN, update(lambda u: {n: v * 1e6 for n, v in u.items()}), "norm"),  # which buries the others'
    (CLOSE_ROUND, update(lambda u: {n: torch.ones(3, 2) for n in NAMES}), "only numbers"),
    (TRAIN, lambda h, r, t: (replace(r, **ERROR), None), "more than its reason"),
    (HANDSHAKE, payload(model={"note": "x" * 300_000}), "'model'"),
    (CLOSE_ROUND, payload(scores={"all": {f"n{i}": 1 for i in range(999)}}), "2 time"),
    (CLOSE_ROUND, payload(scores={"findings": {"new": FINDINGS}}), "2 time steps"),
    (CLOSE_ROUND, payload(scores={"ballast": {"x": [1.0] * 99}}), "2 time steps"),
]


@pytest.mark.parametrize("task", [HANDSHAKE, TRAIN, CLOSE_ROUND])
def test_attempts_cost_their_sites_and_nobody_else(tmp_path, task):
    """All at once, one a site, beside one that is honest."""
    attempts = {f"site-b{n:02}": (spoil, words) for n, (at, spoil, words) in enumerate(ATTEMPTS) if at == task}
    liars = [Spoilt(name, spoil, task) for name, (spoil, _) in attempts.items()]
    events = run(controller := federation(tmp_path, *liars, num_rounds=1))
    assert of_kind(events, End)[0].status == "completed", of_kind(events, End)[0].reason
    accounts = {
        HANDSHAKE: [(event.sites, event.absent) for event in of_kind(events, Start)],
        TRAIN: [(event.sites, event.refused) for event in of_kind(events, Step)],
        CLOSE_ROUND: [(event.sites, event.left_out) for event in of_kind(events, Validation)],
    }[task]
    for sites, account in accounts:
        assert "site-a" in sites
        assert not {name: account[name] for name, (_, words) in attempts.items() if words not in account[name]}
    if task == TRAIN:
        run(alone := federation(tmp_path / "alone", num_rounds=1))
        assert all(torch.equal(last(alone).weights[name], last(controller).weights[name]) for name in NAMES)


def test_a_site_has_no_more_reports_and_samples_than_it_announced(tmp_path):
    events = run(federation(tmp_path, Spoilt("site-b", numbers(reports=10**9), CLOSE_ROUND), num_rounds=1))
    validation = of_kind(events, Validation)[0]
    assert validation.sites["site-b"].n == 2 * 2  # as many as its counts of two steps say
    honest = QuadraticSite("site-b", [pair(4), pair(5)], samples=2, validation=pair(10))
    ends = []
    for name, site in {"honest": honest, "liar": Spoilt("site-b", numbers(samples=10**9), TRAIN)}.items():
        run(controller := federation(tmp_path / name, site))
        ends.append(last(controller))
    assert same_bits(*ends)


def five(lie=None, samples=2):
    """Five sites, of which the first by name may lie in training."""
    honest = {f"site-{i}": QuadraticSite(f"site-{i}", [pair(i)] * 2, samples=2, validation=pair(i)) for i in range(4)}
    return honest | {"a-liar": Spoilt("a-liar", lie or (lambda h, r, t: (r, t)), TRAIN, [pair(4)] * 2, samples)}


def ended(method, folder, sites, **settings):
    controller = FunctionFederation(folder, sites, method, **({"num_rounds": 2, "time_steps": 2} | settings))
    events = run(controller)
    assert of_kind(events, End)[0].status == "completed", of_kind(events, End)[0].reason
    return last(controller).weights, events


def test_one_site_cannot_take_over_the_mean_by_the_visits_that_it_claims(tmp_path):
    sites = five(lambda h, r, t: (r, {n: 3 * torch.ones(3, 2) for n in t}), samples=10**9)
    w, events = ended("fedavg", tmp_path, sites, num_rounds=1, time_steps=1, max_share=0.5)
    assert of_kind(events, Start)[0].counts["a-liar"]["train"] == [20]  # ten times the others' two
    alarms = [event.text for event in of_kind(events, Alarm)]
    assert len(alarms) == 2 and "far more visits" in alarms[0] and "50%" in alarms[1]
    page = (tmp_path / "fedtar" / "report.html").read_text()
    assert all(f"ALARM: {text}" in page for text in alarms)
    start = sites["site-0"].start()
    for k, name in enumerate(NAMES):
        honest = sum(0.125 * -0.5 * (start[name] - pair(i)[k]) for i in range(4))
        torch.testing.assert_close(w[name], start[name] + 0.5 * 3 + honest)


def starting(value, claims=coarse_checksums):
    """A site that lies in the handshake: of its initial weights, and of their checksum."""

    def lie(header, reply, tensors):
        lied = {name: torch.full((3, 2), value) for name in NAMES}
        own = {"start": claims(lied)} if claims else {}
        return replace(reply, payload=reply.payload | own), lied if tensors else None

    return Spoilt("a-liar", lie, HANDSHAKE)


@pytest.mark.parametrize("claims", [coarse_checksums, None])
@pytest.mark.parametrize("value", [1e37, 0.0])
def test_the_first_site_by_name_does_not_choose_the_start(tmp_path, value, claims):
    sites = five() | {"a-liar": starting(value, claims)}
    _, events = ended("fedavg", tmp_path, sites, num_rounds=1)
    came_down = sites["site-0"].received[1, 0]
    assert all(torch.equal(came_down[name], own) for name, own in sites["site-0"].start().items())
    assert ["a-liar" in event.text for event in of_kind(events, Alarm)] == [True]
    if claims and value:  # without a majority, the run ends and says who has which start
        two = {name: sites[name] for name in ("site-0", "a-liar")}
        end = of_kind(run(FunctionFederation(tmp_path / "two", two, "fedavg", num_rounds=1, time_steps=2)), End)[0]
        assert end.status == "failed" and "a-liar" in end.reason and "site-0" in end.reason


@given(st.integers(0, 999), st.sampled_from([1e-7, 0.0]), st.sampled_from([0.5, -1.0, 4.0]))
def test_checksums_of_a_start_forgive_rounding_and_nothing_else(seed, noise, other):
    generator = torch.Generator().manual_seed(seed)
    start = {"a": torch.randn(40, 9, generator=generator), "b": torch.zeros(3)}
    rounded = {"a": start["a"] * (1 + noise * torch.randn(40, 9, generator=generator)), "b": start["b"]}
    own = coarse_checksums(start)
    assert coarsely_equal(own, coarse_checksums(rounded))
    for changed in ({"a": other * start["a"]}, {"a": start["a"].flip(0)}, {"b": torch.full((3,), 1e-9)}):
        assert not coarsely_equal(own, coarse_checksums(start | changed))


FOREIGN_CODE = {"peft_type": "LORA", "auto_mapping": {"parent_library": "os"}}


@pytest.mark.parametrize(
    "described", [{"model": {"parameters": 100, "license": "none"}}, {"adapter_config": FOREIGN_CODE}]
)
def test_one_site_alone_does_not_describe_the_adapter(tmp_path, described):
    liar = Spoilt("a-liar", payload(**described), HANDSHAKE)
    _, events = ended("fedavg", tmp_path, five() | {"a-liar": liar}, num_rounds=1)
    start = of_kind(events, Start)[0]
    assert "description" in start.absent["a-liar"] and "license" not in start.model
    pair_of = {name: site for name, site in five().items() if name == "site-0"} | {"a-liar": liar}
    end = of_kind(run(FunctionFederation(tmp_path / "two", pair_of, "fedavg", num_rounds=1, time_steps=2)), End)[0]
    assert end.status == "failed" and "as many sites" in end.reason


LIES = {
    "the other way": lambda h, r, t: (r, {n: -4 * v for n, v in t.items()}),
    "far away": lambda h, r, t: (r, {n: 2 * torch.ones(3, 2) for n in t}),
}


ATTACKS = [("fedtar", "far away"), *((name, "the other way") for name in ("fedtar", "fedavg", "fedyogi", "drfa"))]


@pytest.mark.parametrize(("method", "lie"), ATTACKS)
def test_one_lying_site_among_five_moves_a_robust_aggregation_little(tmp_path, monkeypatch, method, lie):
    monkeypatch.setattr(Results, "finish", lambda self, numbers: None)  # pages take longest

    def moved(aggregation):
        settings, place = {"aggregation": aggregation, "min_sites": 3}, tmp_path / aggregation
        w, other = (ended(method, place / str(liar), five(liar), **settings)[0] for liar in (None, LIES[lie]))
        return sum(float((w[name] - other[name]).square().sum()) for name in NAMES) ** 0.5

    taken = moved("mean")
    for aggregation in set(FEWEST_SITES) - {"mean"}:
        assert moved(aggregation) < 0.7 * taken, aggregation


@pytest.mark.parametrize(("aggregation", "best"), [("mean", 1), ("median", 2)])
def test_the_best_round_is_the_majority_s_where_sites_count_by_their_median(tmp_path, aggregation, best):
    """The losses fall from round to round at all sites but one, which says so for the first round alone."""

    def spoil(header, reply, tensors):
        loss = 0.0 if header.round == 1 else 1e4
        return replace(reply, numbers=reply.numbers | {"validation_loss": loss}), tensors

    sites = five() | {"a-liar": Spoilt("a-liar", spoil, CLOSE_ROUND)}
    ended("fedtar", tmp_path, sites, aggregation=aggregation, min_sites=3)
    assert json.loads((tmp_path / "fedtar" / "metrics.json").read_text())["best_round"] == best


def chunks_until_refused(monkeypatch, chunks):
    """How many chunks of a message are taken in before it is given up, through FLARE's own consumer."""
    from nvflare.app_opt.pt import tensor_downloader
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils.fobs import fobs
    from safetensors.torch import save

    taken = []

    def download(*, consumer, ref_id, **_):  # as download_object, which ends at the first exception
        for chunk in chunks:
            try:
                consumer.consume(ref_id, {}, [save(chunk)])
            except Exception as error:
                return consumer.download_failed(ref_id, str(error))
            taken.append(len(chunk))
        return consumer.download_completed(ref_id)

    monkeypatch.setattr(tensor_downloader, "download_object", download)
    wire.register_tensors()
    decomposer = fobs._decomposers["torch.Tensor"]
    assert isinstance(decomposer, TensorDecomposer)
    asked = {"from_fqcn": "site", "ref_id": "1", "per_request_timeout": 1.0, "cell": None, "use_disk": False}
    return taken, *decomposer._download(**asked)


def test_a_message_is_fetched_up_to_a_limit_and_the_controller_expects_no_more_than_the_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "_most_bytes", 4 * 1000)
    endless = ({f"t{i}": torch.zeros(300)} for i in range(10**9))
    taken, error, _ = chunks_until_refused(monkeypatch, endless)
    assert len(taken) == 3 and "not fetched" in error
    names = (many(5000) for _ in range(10**9))
    monkeypatch.setattr(wire, "_most_bytes", 4 * 10**9)
    taken, error, _ = chunks_until_refused(monkeypatch, names)
    assert len(taken) == 4 and "not fetched" in error
    taken, error, result = chunks_until_refused(monkeypatch, [{"a": torch.ones(3)}, {"b": torch.ones(2)}])
    assert not error and torch.equal(result["a"], torch.ones(3)) and set(result) == {"a", "b"}
    run(federation(tmp_path, num_rounds=1))
    assert wire._most_bytes == 4 * 12 * 2  # 12 values, in at most the two groups of a task
    taken, error, _ = chunks_until_refused(monkeypatch, [{"x": torch.zeros(25)}])
    assert not taken and "not fetched" in error
