"""The executor by itself: each task in a fresh instance, as in the plain simulator; what a site keeps between them."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hospital_site import SETTINGS, T, a_round, loss_differences, state_of

from fedtar_flare.core.settings import matches
from fedtar_flare.protocol.contract import HEAD_NAMES
from fedtar_flare.protocol.messages import version
from fedtar_flare.reporting.examples import read_examples
from fedtar_flare.runtime.task import Task
from fedtar_flare.testing import Hospital


def two_rounds(folder, run_id, fresh):
    """A site's answers to the tasks of two rounds, of which the first training is done twice."""
    site = Hospital(folder, fresh=fresh, model={"max_length": 8, "num_beams": 1})
    run = SimpleNamespace(site=site, hello=site.handshake(run_id, evaluate=True), trained={}, ws=[])
    w = run.hello[1]
    for r in (1, 2):
        run.ws = [w]
        for t in range(1, T + 1):
            run.trained[r, t] = reply, update = site.train(w, r, t, run_id)
            assert reply.status == "ok", reply.reason
            w = {name: w[name] + 0.5 * update[name] for name in w}
            run.ws.append(w)
        if r == 1:
            run.again = site.train(run.ws[0], 1, 1, run_id)
            assert site.train(run.ws[1], 1, 2, run_id)[0].status == "ok"
        run.closed = site.close(w, r, evaluate=True, run_id=run_id)[0]
    return run


@pytest.fixture(scope="module")
def whole(place):
    return two_rounds(place, "whole", fresh=True)


@pytest.fixture(scope="module")
def one(place):
    return two_rounds(place, "one", fresh=False)


def test_a_new_process_for_every_task_gives_the_same_bits_as_one_and_so_does_a_task_done_again(whole, one):
    assert all(torch.equal(value, one.ws[-1][name]) for name, value in whole.ws[-1].items())
    assert whole.closed.payload["t_numbers"] == one.closed.payload["t_numbers"]
    assert whole.closed.numbers["validation_loss"] == one.closed.numbers["validation_loss"]
    for run in (whole, one):
        (first, update), (again, same) = run.trained[1, 1], run.again
        assert all(torch.equal(value, same[name]) for name, value in update.items())
        assert first.numbers["train_loss"] == again.numbers["train_loss"]


def test_t_numbers_agree_with_differences_of_the_validation_loss(one):
    differences = loss_differences(one.site.executor.strategy.learner, one.ws)
    assert one.closed.payload["t_numbers"] == pytest.approx(differences, rel=0.05, abs=1e-4)


def test_a_site_sends_no_more_t_numbers_than_a_share_of_the_exchange_s_values(whole, monkeypatch):
    values = sum(value.numel() for value in whole.ws[-1].values())
    for share, sends in (((2 * T + 0.5) / values, True), ((2 * T - 0.5) / values, False)):
        monkeypatch.setattr("fedtar_flare.methods.fedtar.site.MOST_SHARE", share)
        reply, _ = whole.site.close(whole.ws[-1], 2, run_id="whole")
        assert (reply.payload["t_numbers"] is not None) is sends


def test_scores_of_each_report_and_examples_stay_in_the_site_s_state_for_its_owner_alone(whole, place):
    folder, hello, closed = state_of(place, "whole").folder, whole.hello[0], whole.closed
    scores = [folder / f"report-scores-{r:04d}.jsonl" for r in (0, 1, 2)]
    assert sorted(folder.glob("report-scores-*")) == scores
    reports = closed.payload["scores"]["all"]["n"]
    for path in scores:
        assert path.stat().st_mode & 0o777 == 0o600
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["personal"] for row in rows] == [True] * reports + [False] * reports
        assert all(row["patient_id"] not in str(closed) and row["visit_id"] not in str(closed) for row in rows)
    assert set(closed.payload) == {"t_numbers", "scores", "scores_generic"}
    for name, personal in (("scores", True), ("scores_generic", False)):
        losses = [row["token_loss"] for row in rows if row["personal"] is personal]
        assert closed.payload[name]["all"]["token_loss"] == pytest.approx(sum(losses) / len(losses))

    assert whole.site.train(whole.ws[0], 1, 1, run_id="another")[0].status == "error", "another run has no state here"
    page = folder / "examples.html"
    examples = read_examples(page.with_name("examples.json"))
    assert examples.synthetic and examples.site == "site-1" and examples.examples
    assert page.stat().st_mode & 0o077 == page.parent.stat().st_mode & 0o077 == 0
    for example in examples.examples:
        assert example.pictures and example.pictures[0] in page.read_text()
        assert not any(part in str(hello) + str(closed) for part in (example.reference, *example.pictures))


@pytest.mark.parametrize("replay", ["seen", "tested"])
def test_a_step_trains_on_its_own_visits_and_on_those_that_are_replayed(whole, hospital, replay):
    counts = whole.hello[0].payload["counts"]["train"]
    assert [reply.numbers["samples"] for reply, _ in whole.trained.values()] == counts * 2
    site, _, w = hospital(temporal={"replay": replay}, training={"local_steps": 1, "batch_size": 2})
    seen = [site.train(w, *place)[0].numbers["samples"] for place in ((1, 1), (1, 2), (2, 1))]
    assert seen == [counts[0], sum(counts), sum(counts)]
    asked = site.train(w, 2, 2, replay=False)[0].numbers["samples"]
    assert asked == (counts[1] if replay == "tested" else sum(counts)), "a server asks only for what the job allows"


@pytest.mark.parametrize(("replay", "where"), [("none", "at step 2"), ("seen", "up to step 2")])
def test_too_few_patients_abstain_and_nothing_is_sent_of_them(hospital, replay, where):
    data = {"synthetic_patients": 16, "min_cell": 1000}
    site, hello, w = hospital(evaluate=True, temporal={"replay": replay}, data=data)
    assert not any(map(sum, hello.payload["counts"].values()))
    cells = [*hello.payload["scores"]["steps"].values(), hello.payload["scores"]["all"]]
    assert cells == [{"n": 0}] * (T + 1)
    for t in range(1, T + 1):
        reply, update = site.train(w, 1, t)
        assert reply.status == "abstain" and update is None and "fewer than 1000 patients" in reply.reason
    assert reply.reason.endswith(where)
    closing = site.close(w, 1)[0]
    assert closing.status == "ok" and set(closing.numbers) == {"seconds"} and not closing.payload


def test_a_member_whose_state_is_lost_says_so_and_never_starts_anew(hospital, tmp_path):
    site, _, w = hospital()
    a_round(site, w)
    state = state_of(tmp_path)
    resumed = {"member": True, "initial_site": "", "after": version(1, T)}
    assert site.handshake(**resumed)[0].status == "ok"
    shutil.rmtree(state.folder)
    for again in range(2):  # the first failure leaves nothing that the second would take for a state
        reply, weights = site.handshake(**resumed)
        assert reply.status == "error" and "no-site-state" in reply.reason and weights is None, again
        assert state.versions() == [] and str(tmp_path) not in reply.reason
    assert site.handshake(initial_site="", after=version(1, T))[0].status == "ok"  # one that joins begins anew
    assert state.versions() == [version(0, 0)]


def test_a_broadcast_too_large_to_learn_from_does_not_spoil_the_private_part(hospital, tmp_path):
    site, _, w = hospital()
    site.train(w, 1, 1)
    state = state_of(tmp_path)
    good = state.read(version(1, 1))[0]
    reply, update = site.train({name: torch.full_like(value, 3e37) for name, value in w.items()}, 1, 2)
    assert reply.status == "error" and "non-finite" in reply.reason and update is None
    assert state.versions() == [version(0, 0), version(1, 1)]
    assert all(torch.equal(value, good[name]) for name, value in state.read(version(1, 1))[0].items())
    assert site.train(w, 1, 2)[0].status == "ok"


def test_broadcasts_of_a_job_that_ended_in_mid_round_never_enter_the_t_numbers(hospital):
    site, _, w = hospital()
    a_round(site, w)  # the job ends before it closes round 1
    site.handshake(member=True, initial_site="")
    moved = {name: value + 0.1 for name, value in w.items()}
    assert site.train(moved, 1, 2)[0].status == "ok"  # the resumed job's step 1 never reached this site
    reply, _ = site.close(moved, 1)
    assert reply.payload["t_numbers"] is None and reply.numbers["reports"] > 0


def test_the_best_round_s_private_part_outlives_pruning(hospital, tmp_path):
    site, _, w = hospital(fresh=False, training={"local_steps": 1, "batch_size": 2})
    for r in range(1, 7):
        assert site.train(w, r, 1, keep=version(1, 1) if r > 1 else "")[0].status == "ok"
    versions = state_of(tmp_path).versions()
    assert version(1, 1) in versions and version(2, 1) not in versions and version(6, 1) in versions


def test_a_handshake_gives_weights_of_the_seed_or_none_even_in_a_process_that_has_trained(hospital, monkeypatch):
    site, _, w = hospital(fresh=False)
    again, same = site.handshake()  # before any other task: the server had lost the first answer
    assert again.status == "ok" and all(torch.equal(same[name], w[name]) for name in w)

    def fails(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patched:  # trained, and then its task failed: nothing of it is on disk
        patched.setattr(Task, "save_private", fails)
        assert site.train(w, 1, 1)[0].status == "error"
    _, weights = site.handshake()
    assert weights is None or all(torch.equal(weights[name], w[name]) for name in w)
    site.close(w, 1)
    reply, weights = site.handshake()
    assert reply.status == "error" and weights is None, "a round was closed"
    assert site.handshake(initial_site="")[0].status == "ok"


LOCAL = {"local_adapter": True}
SMALL = {"model": {"max_length": 8, "num_beams": 1}}
HEAD = {"labeler": "synthetic", "shared": True}


def rounds(place, run_id, patient, last_alpha=0.25, number=1, fresh=True, **settings):
    """Rounds whose last step enters with ``last_alpha``; of each the answer, w_T, w_{T-1}, update, state and scores."""
    site = Hospital(place, patient=patient, fresh=fresh, **SMALL, **settings)
    state, closed = state_of(place, run_id), []
    w = site.handshake(run_id)[1]
    for r in range(1, number + 1):
        for t in range(1, T + 1):
            before = w
            alpha = last_alpha if t == T else 0.5
            reply, update = site.train(w, r, t, run_id, alpha=alpha)
            assert reply.status == "ok", reply.reason
            w = {n: w[n] + alpha * update[n] for n in w}
        reply, _ = site.close(w, r, evaluate=True, run_id=run_id)
        private, started = (state.read(version(r, t))[0] for t in (T, T - 1))
        lines = (state.folder / f"report-scores-{r:04d}.jsonl").read_text().splitlines()
        scores = {(row["personal"], row["visit_id"]): row for row in map(json.loads, lines)}
        about = {"closed": reply, "w": w, "before": before, "update": update}
        closed.append(SimpleNamespace(**about, private=private, started=started, scores=scores))
    return closed


def test_what_travels_and_the_shared_adapter_alone_are_to_the_bit_as_without_it(place):
    both = (rounds(place, name, own, number=2, diagnosis=HEAD) for name, own in (("local", LOCAL), ("averaged", {})))
    for a, b in zip(*both, strict=True):
        assert all(torch.equal(a.update[n], b.update[n]) and torch.equal(a.w[n], b.w[n]) for n in a.w)
        assert {**a.closed.numbers, "seconds": 0.0} == {**b.closed.numbers, "seconds": 0.0}
        assert a.closed.payload["t_numbers"] == b.closed.payload["t_numbers"]
        assert a.closed.payload["scores_generic"] == b.closed.payload["scores_generic"]
        assert all(row == b.scores[key] for key, row in a.scores.items() if not key[0])
        factors = {n.removeprefix("local/"): value for n, value in a.private.items() if n.startswith("local/")}
        assert set(factors) == {n for n in a.w if not matches(n, [HEAD_NAMES])} != set(a.w), "the head is the server's"
        for name, value in factors.items():
            torch.testing.assert_close(value, a.before[name] + a.update[name], rtol=0, atol=1e-6)
        assert set(a.private) - set(b.private) == {f"local/{n}" for n in factors}
        assert all(torch.equal(a.private[n], value) for n, value in b.private.items())


OWN_HEAD = {"labeler": "synthetic"}


@pytest.mark.slow
def test_what_stays_moves_by_the_alpha_of_its_step_where_the_job_says_so(place):
    """At the last step from the same start: alpha of it against all of it, in numpy; the update is the same."""
    under = {"temporal": {"personal": "alpha"}, "diagnosis": OWN_HEAD}
    runs = (rounds(place, f"alpha-{alpha:.0%}".rstrip("%"), LOCAL, alpha, **under) for alpha in (1.0, 0.25, 0.0))
    (whole,), (part,), (none,) = runs
    assert all(torch.equal(whole.update[n], part.update[n]) for n in whole.update)
    moved = [n for n in whole.private if n.startswith(("patient/", "diagnosis/"))]
    assert {n.split("/")[0] for n in moved} == {"patient", "diagnosis"}
    for name in moved:
        start, end = whole.started[name].double().numpy(), whole.private[name].double().numpy()
        assert (whole.started[name] == part.started[name]).all() and (none.private[name] == none.started[name]).all()
        np.testing.assert_allclose(part.private[name].double().numpy(), start + 0.25 * (end - start), atol=1e-7)
    assert any((whole.private[n] != whole.started[n]).any() for n in moved)
    for alpha, run in ((1.0, whole), (0.25, part), (0.0, none)):
        for name, value in run.before.items():
            expected = value.double().numpy() + alpha * run.update[name].double().numpy()
            np.testing.assert_allclose(run.private[f"local/{name}"].double().numpy(), expected, atol=1e-6)
    (plain,) = rounds(place, "alpha-off", LOCAL, 0.25, diagnosis=OWN_HEAD)
    assert any((plain.private[n] != part.private[n]).any() for n in moved), "off, nothing is scaled"


def test_augmentation_changes_training_and_repeats_itself_and_leaves_validation_alone(hospital):
    losses = []
    for run_id, augment in (("plain", False), ("augmented", True), ("again", True)):
        training = {**SETTINGS["training"], "local_steps": 1, "augment": augment}
        site, _, w = hospital(run_id, training=training)
        untrained = site.close(w, 1, run_id=run_id)[0].numbers["validation_loss"]
        site.handshake(f"{run_id}-trained")
        losses.append((site.train(w, 1, 1, f"{run_id}-trained")[0].numbers["train_loss"], untrained))
    plain, augmented, again = losses
    assert augmented == again and augmented[0] != plain[0] and augmented[1] == plain[1]
