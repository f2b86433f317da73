"""The executor by itself: its three tasks, each in a fresh instance, as the plain simulator runs them."""

from __future__ import annotations

import html

import pytest
import torch
from hospital_site import SETTINGS, HospitalSite, T, a_round, executor_of, write_site_files
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.signal import Signal

from fedtar_flare.errors import ConfigError
from fedtar_flare.reporting.examples import read_examples
from fedtar_flare.runtime.site_executor import seed_of


@pytest.fixture(autouse=True)
def _environment(home, tmp_path, monkeypatch):
    write_site_files(tmp_path, home, monkeypatch)


def test_handshake_tells_what_the_server_needs_and_nothing_private(tmp_path):
    reply, weights = HospitalSite(tmp_path).handshake(evaluate=True)
    assert reply.status == "ok", reply.reason
    assert set(weights) == set(reply.payload["schema"]["shapes"])
    assert all("lora_" in name for name in weights)
    assert [len(v) for v in reply.payload["counts"].values()] == [T] * 3
    assert reply.payload["scores"]["all"]["n"] == sum(reply.payload["counts"]["test"])
    assert "SYN" not in str(reply.payload) and str(tmp_path) not in str(reply.payload)


def test_a_new_process_for_every_task_gives_the_same_bits_as_one(tmp_path):
    ends = []
    for fresh in (True, False):
        run_id = f"fresh-{fresh}"
        site = HospitalSite(tmp_path, fresh=fresh)
        _, w = site.handshake(run_id)
        for r in (1, 2):
            w, _ = a_round(site, w, r, run_id)
            reply, _ = site.close(w, r, run_id=run_id)
        ends.append((w, reply))
    (a, x), (b, y) = ends
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert x.payload["t_numbers"] == y.payload["t_numbers"]
    assert x.numbers["validation_loss"] == y.numbers["validation_loss"]


def test_a_task_that_is_done_again_starts_from_the_version_it_names(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake()
    first, _ = site.train(w, 1, 1), site.train(w, 1, 2)
    again = site.train(w, 1, 1)
    assert all(torch.equal(first[1][n], again[1][n]) for n in w)
    assert first[0].numbers["train_loss"] == again[0].numbers["train_loss"]


@pytest.mark.parametrize("replay", ["none", "seen"])
def test_a_step_trains_on_its_own_visits_and_on_those_that_are_replayed(tmp_path, replay):
    site = HospitalSite(tmp_path, temporal={"replay": replay})
    reply, w = site.handshake()
    counts = reply.payload["counts"]["train"]
    up_to = [sum(counts[:t]) for t in range(1, T + 1)]
    told = {r: [site.train(w, r, t)[0].numbers["samples"] for t in range(1, T + 1)] for r in (1, 2)}
    assert told[1] == (counts if replay == "none" else up_to)
    assert told[2] == {"none": counts, "seen": [sum(counts)] * T}[replay]


@pytest.mark.parametrize(("replay", "where"), [("none", "at step 2"), ("seen", "up to step 2")])
def test_an_abstention_says_which_visits_were_too_few(tmp_path, replay, where):
    site = HospitalSite(tmp_path, temporal={"replay": replay}, data={"synthetic_patients": 16, "min_cell": 99})
    _, w = site.handshake()
    reply, update = site.train(w, 1, 2)
    assert (reply.status, update) == ("abstain", None) and reply.reason.endswith(where)


def test_t_numbers_agree_with_differences_of_the_validation_loss(tmp_path):
    """First order: L(w_T) - L(w_T - epsilon (w_t - w_{t-1})) is epsilon times the T number of step t."""
    site = HospitalSite(tmp_path, fresh=False)
    _, w0 = site.handshake()
    ws = [w0]
    for t in range(1, T + 1):
        _, update = site.train(ws[-1], 1, t)
        ws.append({n: ws[-1][n] + 0.5 * update[n] for n in w0})
    reply, _ = site.close(ws[-1], 1)
    learner = site.executor.strategy.learner
    for t in range(1, T + 1):
        step = {n: ws[t][n] - ws[t - 1][n] for n in w0}
        losses = []
        for sign in (1, -1):
            learner.load_shared({n: ws[-1][n] + sign * 0.05 * step[n] for n in w0})
            losses.append(learner.validate().loss)
        assert reply.payload["t_numbers"][t - 1] == pytest.approx((losses[0] - losses[1]) / 0.1, rel=0.05, abs=1e-4)


def test_a_site_that_missed_a_step_sends_its_loss_and_no_t_numbers(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake()
    site.train(w, 1, 2)
    reply, _ = site.close(w, 1)
    assert reply.payload["t_numbers"] is None and reply.numbers["reports"] > 0


def test_a_site_tells_no_more_t_numbers_than_a_share_of_the_exchange_s_values(tmp_path, monkeypatch):
    site = HospitalSite(tmp_path)
    w, _ = a_round(site, site.handshake()[1])
    values = sum(value.numel() for value in w.values())
    for share, told in (((T + 0.5) / values, True), ((T - 0.5) / values, False)):
        monkeypatch.setattr("fedtar_flare.methods.fedtar.site.MOST_SHARE", share)
        reply, _ = site.close(w, 1)
        assert (reply.payload["t_numbers"] is not None) is told


def test_too_few_patients_abstain_and_nothing_is_told_of_them(tmp_path):
    site = HospitalSite(tmp_path, data={"synthetic_patients": 16, "min_cell": 1000})
    hello, w = site.handshake(evaluate=True)
    assert not any(map(sum, hello.payload["counts"].values()))
    cells = [*hello.payload["scores"]["steps"].values(), hello.payload["scores"]["all"]]
    assert cells == [{"n": 0}] * (T + 1)
    for t in range(1, T + 1):
        reply, update = site.train(w, 1, t)
        assert reply.status == "abstain" and update is None and "fewer than 1000 patients" in reply.reason
    closing = site.close(w, 1)[0]
    assert closing.status == "ok" and set(closing.numbers) == {"seconds"} and not closing.payload


def test_bfloat16_updates_travel_as_such(tmp_path):
    site = HospitalSite(tmp_path, lora={"dtype_up": "bfloat16"})
    reply, w = site.handshake()
    assert reply.payload["schema"]["dtype_up"] == "bfloat16" and all(v.dtype == torch.float32 for v in w.values())
    _, update = site.train(w, 1, 1)
    assert all(v.dtype == torch.bfloat16 for v in update.values())


def test_without_the_patient_part_nothing_but_the_shared_adapter_trains(tmp_path):
    site = HospitalSite(tmp_path, patient={"enabled": False})
    reply, w = site.handshake()
    assert reply.payload["model"]["patient_parameters"] == 0
    assert site.train(w, 1, 1)[0].status == "ok"


def test_what_the_server_sends_is_checked_before_it_is_loaded(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake()
    name = next(iter(w))
    for bad in (
        {**w, "other": torch.ones(1)},
        {n: v for n, v in w.items() if n != name},
        {**w, name: torch.ones(1)},
        {**w, name: torch.full_like(w[name], float("nan"))},
    ):
        reply, update = site.train(bad, 1, 1)
        assert reply.status == "error" and update is None
        assert name in reply.reason or "other" in reply.reason


def test_a_hospital_without_a_site_file_never_trains_on_phantoms(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDTAR_SITES")
    reply, weights = HospitalSite(tmp_path, name="hospital", simulated=False).handshake()
    assert reply.status == "error" and "site file" in reply.reason and weights is None
    assert str(tmp_path) not in reply.reason


def test_another_run_never_meets_the_state_of_the_first(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake()
    reply, _ = site.train(w, 1, 1, run_id="another")
    assert reply.status == "error"


@pytest.mark.parametrize("fresh", [True, False])
def test_an_abort_is_honoured_between_batches(tmp_path, fresh):
    site = HospitalSite(tmp_path, fresh=fresh)
    _, w = site.handshake()
    site.signal = Signal()  # each task has a signal of its own, also in an executor that lives on
    site.signal.trigger(True)
    code, _ = site.train(w, 1, 1)
    assert code == ReturnCode.TASK_ABORTED


def test_seeds_differ_by_all_that_names_a_task():
    seeds = {
        seed_of(s, site, r, t, task) for s in (0, 1) for site in "ab" for r in (1, 2) for t in (1, 2) for task in "xy"
    }
    assert len(seeds) == 32


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"preset": "smal"}, "small"),
        ({"training": {"lrr": 1}}, "lr"),
        ({"training": {"lr": -1.0}}, "lr"),
        ({"lora": {"rank": 0}}, "rank"),
        ({"lora": {"dtype_up": "float16"}}, "dtype_up"),
        ({"patient": {"profile": ["sex"]}}, "profile"),
        ({"data": {"alignment": "month"}}, "alignment"),
        ({"data": {"periods": ["2020-01-01", "2019-01-01"]}}, "periods"),
        ({"torch_threads": 0}, "torch_threads"),
    ],
)
def test_bad_settings_fail_when_built_and_name_the_right_one(bad, word):
    with pytest.raises(ConfigError, match=word):
        executor_of("fedtar", **bad)


def test_losses_of_local_updates_stream_from_simulated_sites_and_not_from_a_hospital(tmp_path):
    site = HospitalSite(tmp_path)
    _, w = site.handshake()
    site.train(w, 1, 1)
    streamed = [(data.tag, data.step) for data in site.streamed]
    count = site.executor.resolved.training.local_steps
    assert streamed == [("loss of local updates", n) for n in range(1, count + 1)]
    assert all(0 < data.value < 20 for data in site.streamed)
    site.train(w, 1, 2)
    assert site.streamed[0].step == count + 1, "the next time step goes on along the same axis"
    policy = tmp_path / "local" / "privacy.json"
    policy.parent.mkdir()
    policy.write_text('{"task_result_filters": [{"path": "fedtar_flare.site.privacy.GaussianPrivacy"}]}')
    site.train(w, 1, 1)
    assert site.streamed == [], "a site with a privacy filter streams nothing past it"
    policy.unlink()
    site_file = tmp_path / "sites" / "site-1.yaml"
    site_file.write_text(site_file.read_text() + "shares: []\n")
    site.train(w, 1, 1)
    assert site.streamed == []


def test_examples_stay_in_the_site_s_state(tmp_path):
    site = HospitalSite(tmp_path)
    reply, _ = site.handshake(evaluate=True)
    page = next((tmp_path / "state").rglob("examples.html"))
    examples = read_examples(page.with_name("examples.json"))
    assert examples.synthetic and examples.site == "site-1" and examples.examples
    assert page.parent.stat().st_mode & 0o077 == 0
    for example in examples.examples:
        assert example.reference not in str(reply.payload)
        assert html.escape(example.reference.split(".")[0]) in page.read_text()


def test_augmentation_changes_training_and_repeats_itself_and_leaves_validation_alone(tmp_path):
    found = []
    for run_id, augment in (("plain", False), ("augmented", True), ("again", True)):
        training = {**SETTINGS["training"], "local_steps": 1, "augment": augment}
        site = HospitalSite(tmp_path, training=training)
        _, w = site.handshake(run_id)
        trained = site.train(w, 1, 1, run_id)[0].numbers["train_loss"]
        site.handshake(f"{run_id}-untrained")
        closed = site.close(w, 1, run_id=f"{run_id}-untrained")[0].numbers["validation_loss"]
        found.append((trained, closed))
    plain, augmented, again = found
    assert augmented == again and augmented[0] != plain[0] and augmented[1] == plain[1]
