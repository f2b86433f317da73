"""A dishonest server, against a site's executor and guard: tasks, weights and settings by which updates say more."""

import errno
import os
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hospital_site import T, write_manifest_site, write_site_files
from tables import cases

from fedtar_flare.core.draws import derived_seed
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import batches
from fedtar_flare.methods.scaffold import PREFIX
from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import HEADER, TaskHeader, version
from fedtar_flare.site import audit
from fedtar_flare.site import state as site_state
from fedtar_flare.site.site_file import Bounds, load_site_config
from fedtar_flare.site.state import MOST_REPEATS, SiteState
from fedtar_flare.testing import Hospital, task_of
from fedtar_flare.testing.hospital import write_workflow

TRAINING = {"local_steps": 1, "batch_size": 2}
RUN = "run"


class Trained:
    """A site after one honest round, whose run every attempt gets a copy of."""

    def __init__(self, folder):
        self.folder, self.site = folder, Hospital(folder, fresh=False, training=TRAINING)
        _, w = self.site.handshake(RUN)
        self.w = [w]
        for t in range(1, T + 1):
            _, update = self.site.train(self.w[-1], 1, t, RUN)
            self.w.append({name: self.w[-1][name] + 0.5 * update[name] for name in update})
        self.copies = 0

    def another(self):
        """Run id of a copy of the run, as it is on the disk now."""
        self.copies += 1
        run = f"copy-{self.copies}"
        shutil.copytree(self.folder / "state" / RUN, self.folder / "state" / run)
        return run

    def state(self, run):
        return SiteState(self.folder / "state", run, "site-1")

    def header(self, run, r, t, **more):
        return replace(self.site.header(run, r, t, after=version(r, max(0, t - 1))), **more)


@pytest.fixture(scope="module")
def trained(home, tmp_path_factory):
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("hospital")
    torch.manual_seed(0)
    write_site_files(folder, home, patch)
    yield Trained(folder)
    patch.undo()


def size(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def one_value_more(w):
    first, *_ = w
    return w | {first: w[first] + torch.eye(w[first].numel())[3].view_as(w[first])}


def closes_a_round_from_other_weights(s, run):
    assert s.site.close(s.w[T], 1, run_id=run)[0].status == "ok"
    return s.site.close({name: value * 1.001 for name, value in s.w[T].items()}, 1, run_id=run)


def trains_without_end(s, run):
    for _ in range(2 * 9 * T + site_state.SPARE_TASKS):
        s.state(run).add_answered(TRAIN, version(1, T))
    return s.site.train(s.w[0], 1, 1, run)


def asks(task, r, t, fields):
    """A task with other fields in its header, also such as no header has, and with the weights after step ``w``."""
    w = fields.pop("w", None)

    def ask(s, run):
        header = SimpleNamespace(to_meta=lambda: {HEADER: asdict(s.header(run, r, t)) | fields})
        return s.site.run(task, header, None if w is None else s.w[w])

    return ask


def trains_from(weights):
    """Step 2 of round 1 from what ``weights`` makes of the honest ones."""
    return lambda s, run: s.site.train(weights(s.w[1]), 1, 2, run)


FOREIGN = "not part of the agreed exchange"
ATTEMPTS = {name: (asks(*asked), why) for name, (*asked, why) in cases(__file__, "attempts.yaml").items()}
ATTEMPTS |= {  # what is done to (site, run), and the reason that the error gives
    "asks for trained weights": (lambda s, run: s.site.handshake(run), "middle of a run"),
    "asks for initial weights of a resumed run": (
        lambda s, run: s.site.handshake(run, member=True, after=version(1, T)), "middle of a run",
    ),
    "closes a round from other weights": (closes_a_round_from_other_weights, "closed already"),
    "trains more often than any run": (trains_without_end, "no run needs more"),
    "steps along one value": (lambda s, run: s.site.train(one_value_more(s.w[0]), 1, 2, run), "few values"),
    "closes one value further": (lambda s, run: s.site.close(one_value_more(s.w[T - 1]), 1, run_id=run), "few values"),
    "junk of its own names": (trains_from(lambda w: {f"junk.{i}": torch.zeros(1000) for i in range(50)}), FOREIGN),
    "junk beside the exchange": (trains_from(lambda w: {**w, "junk": torch.zeros(100_000)}), FOREIGN),
    "weights of another shape": (trains_from(lambda w: dict.fromkeys(w, torch.zeros(100, 100))), "shape"),
    "more tensors than any exchange": (
        trains_from(lambda w: {f"t{i}": torch.zeros(1) for i in range(20_001)}), "the limit is 20000",
    ),
    "a task of another run": (lambda s, run: s.site.train(s.w[0], 1, 1, "never-heard-of"), "no-site-state"),
}  # fmt: skip


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_gets_a_reason_and_nothing_else_and_leaves_nothing(trained, attempt):
    run = trained.another()
    before = size(trained.folder / "state")
    does, reason = ATTEMPTS[attempt]
    reply, tensors = does(trained, run)
    status = "abstain" if does is closes_a_round_from_other_weights else "error"
    assert (reply.status, tensors or None) == (status, None) and reason in reply.reason
    assert set(reply.numbers) <= {"seconds"} and not reply.payload
    assert str(trained.folder) not in reply.reason
    assert size(trained.folder / "state") < before + 20_000, "what came down was not kept"


def test_scores_are_told_of_one_set_of_weights_at_one_place_of_a_run(trained):
    run = trained.another()
    header = trained.header(run, 0, 0, after=version(1, T), evaluate=True, member=True)
    first, _ = trained.site.run(HANDSHAKE, header, trained.w[T])
    same, _ = trained.site.run(HANDSHAKE, header, trained.w[T])
    assert first.payload["scores"] == same.payload["scores"]
    elsewhere = trained.header(run, 0, 0, after=version(1, 77), evaluate=True, member=True)  # the same round
    for asked in (header, elsewhere):
        other, _ = trained.site.run(HANDSHAKE, asked, trained.w[0])
        assert other.status == "ok" and not {"scores", "scores_generic"} & set(other.payload)
    later = trained.header(run, 0, 0, after=version(2, T), evaluate=True, member=True)
    assert "scores" in trained.site.run(HANDSHAKE, later, trained.w[0])[0].payload
    closed, _ = trained.site.close(trained.w[T], 2, evaluate=True, run_id=run)  # of a round, two sets were told
    assert closed.status == "ok" and not {"scores", "scores_generic"} & set(closed.payload)


def test_tasks_that_are_asked_again_make_no_second_answer_of_a_round(trained):
    """What stays at the site follows from the round before, too: with it validation loss, T numbers and scores."""
    run, w = trained.another(), trained.w[T]
    for t in (1, 2):
        trained.site.train(w, 2, t, run)
    assert trained.site.close(w, 2, evaluate=True, run_id=run)[0].payload["scores"]
    trained.site.train({name: value * 1.01 for name, value in trained.w[1].items()}, 1, 2, run)
    for t in (1, 2):
        assert trained.site.train(w, 2, t, run)[0].status == "ok"
    reply, _ = trained.site.close(w, 2, evaluate=True, run_id=run)
    assert reply.status == "abstain" and "tasks before it" in reply.reason and not reply.payload
    again = trained.header(run, 0, 0, after=version(2, T), evaluate=True, member=True)
    assert "scores" not in trained.site.run(HANDSHAKE, again, w)[0].payload


def test_a_site_of_which_everybody_is_scored_trains_on_nobody(trained):
    """Else nobody would know in which round a patient came into the run, once one withdraws."""
    _, w = trained.site.handshake("unseen", score="all")
    reply, update = trained.site.train(w, 1, 1, "unseen", score="all")
    assert (reply.status, update) == ("error", None) and "never trains" in reply.reason
    assert trained.state("unseen").versions() == [version(0, 0)]


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["space", "write", "answered", "audit"])
def test_a_full_disk_has_a_reason_of_its_own(trained, monkeypatch, where):
    little = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=10_000_000))
    broken = {"space": (site_state, "shutil", little), "write": (site_state, "write_tensors", full)}
    broken |= {"answered": (SiteState, "add_answered", full), "audit": (audit, "try_to_write", full)}
    run = trained.another()
    monkeypatch.setattr(*broken[where])
    if where == "audit":
        monkeypatch.setattr(trained.site.executor, "perform", None)  # no task is begun
    reply, update = trained.site.train(trained.w[0], 1, 1, run)
    reason = "the site's audit file cannot be written" if where == "audit" else "the site's disk is full"
    assert reply.status == "error" and reply.reason == reason and update is None


def test_a_server_cannot_fill_a_site_with_runs(trained, monkeypatch):
    monkeypatch.setattr(site_state, "MAX_RUNS", 1)
    own = SiteState(trained.folder / "state", "one", "hospital")
    own.folder.mkdir(parents=True)
    own.require_capacity()  # a run that is there already goes on
    hospital = Hospital(trained.folder, name="hospital", simulated=False, training=TRAINING)
    assert "for simulations" in hospital.handshake(rounds_per_period=1)[0].reason, "a hospital has its own clock"
    reply, w = hospital.handshake("two")
    assert reply.status == "error" and "purge" in reply.reason and w is None
    assert not (trained.folder / "state" / "two").exists()


def test_a_reply_is_never_an_exception(trained):
    for meta in ({}, {HEADER: None}, {HEADER: []}, {HEADER: {"plugin": 3}}, {HEADER: {"run_id": RUN}}):
        reply, _ = trained.site.run(CLOSE_ROUND, SimpleNamespace(to_meta=lambda meta=meta: meta))
        assert reply.status == "error" and reply.round == -1


ROUNDS = 26
STEPS, SIZE = 4, 4
RATE = Bounds().min_learning_rate
"""The least that the default bounds of a site with patients allow."""
WORDS = ("small", "large", "left", "effusion", "nodule", "none", "stable", "heart", "lungs", "clear")


@pytest.fixture
def hospital(tmp_path, home, monkeypatch):
    """A real hospital with a report of each of so many patients; its policy is the default one."""

    def build(reports, policy="{}", method="fedtar", **settings):
        write_manifest_site(tmp_path, home, monkeypatch, reports, policy)
        write_workflow(tmp_path / "app", num_rounds=ROUNDS, time_steps=1)
        settings = {"preset": "tiny", "model": {"slices": 1}, "data": {}, "training": {"local_steps": 4}} | settings
        return Hospital(tmp_path, fresh=False, simulated=False, method=method, app=tmp_path / "app", **settings)

    return build


def ask(site, task, r, weights=None, **more):
    """A task of round r of a run of one time step."""
    first = {"initial_site": site.name, "after": version(0, 0)} if task == HANDSHAKE else {}
    first = first or {"after": version(r, int(task == CLOSE_ROUND))}
    header = TaskHeader(site.method, "run", r, min(r, 1), ROUNDS, 1, **(first | more))
    return site.run(task, header, weights)


@pytest.mark.parametrize("method", ["fedtar", "fedavg"])
def test_the_number_of_updates_follows_from_the_count_that_is_told(hospital, monkeypatch, method):
    """Weight decay of a factor without a gradient tells the number of updates to the last one."""
    sizes = []
    monkeypatch.setattr(ReportLearner, "local_update", lambda self, batch, *_: sizes.append(len(batch)) or 1.0)
    site = hospital(["Clear lungs."] * 40, method=method, training={"local_epochs": 8, "batch_size": 8})
    _, w = ask(site, HANDSHAKE, 0)
    reply, _ = ask(site, TRAIN, 1, w)
    learner, told = site.executor.strategy.learner, int(reply.numbers["samples"])
    exact = len(learner.cohort.samples("train"))
    assert exact % 5, "a count that is a multiple of the minimum cell would show nothing"
    assert told == exact - exact % 5 and len(sizes) == told


def test_tiny_factors_leave_no_gradient_of_the_sizes_that_it_had(hospital):
    """A = 0 and a tiny B in one layer: AdamW's epsilon passed the gradient on as it was."""
    site = hospital(["Clear lungs.", "Nodule left.", "Large heart."] * 14)
    _, w = ask(site, HANDSHAKE, 0)
    a, b = (next(n for n in w if n.endswith(f"h.0.attn.c_attn.lora_{side}.weight")) for side in "AB")
    reply, update = ask(site, TRAIN, 1, w | {a: torch.zeros_like(w[a]), b: torch.full_like(w[b], 1e-12)})
    rate = site.executor.strategy.settings.training.lr
    assert reply.status == "ok" and update[a].abs().median() > rate, "of the optimiser's steps, not of the gradient"


@pytest.mark.parametrize("task", [HANDSHAKE, TRAIN, CLOSE_ROUND])
def test_an_adapter_that_outweighs_the_model_is_refused_before_anything_is_done_with_it(hospital, task):
    site = hospital(["Clear lungs."] * 42)
    _, w = ask(site, HANDSHAKE, 0)
    loud = {name: value + 100 for name, value in w.items()}
    more = {"initial_site": ""} if task == HANDSHAKE else {}
    if task == CLOSE_ROUND:
        ask(site, TRAIN, 1, w)
    reply, update = ask(site, task, int(task != HANDSHAKE), loud, **more)
    assert (reply.status, update) == ("error", None) and "max_adapter_norm" in reply.reason
    assert ask(site, task, int(task != HANDSHAKE), w, **more)[0].status != "error"


def test_the_same_question_is_answered_a_few_times_and_never_from_an_earlier_state(hospital):
    site = hospital(["Clear lungs."] * 42, policy="{max_answers: 10}")
    _, w = ask(site, HANDSHAKE, 0)
    for after in (version(0, 0), version(1, 0), version(2, 1)):
        assert "state version" in ask(site, TRAIN, 2, w, after=after)[0].reason
    answers = [ask(site, TRAIN, 1, w)[0] for _ in range(MOST_REPEATS + 1)]
    assert [reply.status for reply in answers] == ["ok"] * MOST_REPEATS + ["error"]
    further = [ask(site, TRAIN, r, w)[0] for r in (2, 3, 4)]
    assert [reply.status for reply in further] == ["ok", "ok", "error"], "ten of all rounds and jobs, refused ones too"
    assert "max_answers" in further[-1].reason


def test_no_update_is_of_fewer_visits_than_the_minimum_cell(hospital, monkeypatch):
    sizes = []
    monkeypatch.setattr(ReportLearner, "local_update", lambda self, batch, *_: sizes.append(len(batch)) or 1.0)
    site = hospital(["Clear lungs."] * 40, training={"local_steps": 40, "batch_size": 4})
    ask(site, TRAIN, 1, ask(site, HANDSHAKE, 0)[1])
    visits = len(site.executor.strategy.learner.cohort.samples("train"))
    assert visits % 4 and min(sizes[1:]) >= 4 and max(sizes) <= 8, "a last batch of 1 to 4 joins the one before"
    assert sum(sizes[: visits // 4]) >= visits


def solved(count, means, seed):
    """What each of ``count`` visits has, given means (ROUNDS, ...) over the batches that ``seed`` gives; residual."""
    rows = np.zeros((ROUNDS, count))
    for r in range(1, ROUNDS + 1):
        for chosen in batches(count, SIZE, STEPS, derived_seed(seed, "site-1", r, 1, TRAIN), Bounds().min_patients):
            rows[r - 1, chosen] += 1 / len(chosen) / STEPS
    values = np.linalg.lstsq(rows, means, rcond=None)[0]
    return values, float(np.linalg.norm(rows @ values - means))


def own_share(found, true):
    """Share of visits whose solved gradient is nearest, by cosine, to the true one of that visit among all."""
    unit = [g / np.linalg.norm(g, axis=1, keepdims=True) for g in (found, true)]
    return float(((unit[0] @ unit[1].T).argmax(1) == np.arange(len(true))).mean())


def test_a_lead_solves_for_no_visit_s_loss_or_gradient_and_not_for_their_number(hospital):
    """A lead who knew which visits each told mean is of could solve for single visits.

    Karimireddy et al.'s control variates are plain means of gradients, and every loss is a mean over the same batches.
    The site has 27 patients with a radiograph each, and reports of many lengths.
    """
    rng = np.random.default_rng(0)
    reports = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(27)]

    def built(**training):
        training = {"local_steps": STEPS, "batch_size": SIZE, "lr": RATE, **training}
        of_job = {"training": training, "data": {"synthetic_patients": 16}, "scaffold": {"optimizer": "sgd"}}
        return hospital(reports, method="scaffold", **of_job)

    site = built()
    _, w = ask(site, HANDSHAKE, 0)
    sent = w | {f"{PREFIX}{name}": torch.zeros_like(value) for name, value in w.items()}
    losses, controls, own = [], [], 0
    for r in range(1, ROUNDS + 1):
        reply, update = ask(site, TRAIN, r, sent)
        assert reply.status == "ok", reply.reason
        own = own + torch.cat([update[f"{PREFIX}{name}"].flatten() for name in w])
        losses.append(reply.numbers["train_loss"])
        controls.append(own)
    controls, losses, told = torch.stack(controls).numpy(), np.array(losses), int(reply.numbers["samples"])

    learner, gradients, true = site.executor.strategy.learner, [], []
    learner.load_shared(sent)
    samples = learner.cohort.samples("train")
    for sample in samples:
        true.append(float(learner._accumulate([sample])))
        gradients.append(torch.cat([p.grad.flatten() for p in learner.shared_parameters.values()]))
    gradients, count = torch.stack(gradients).numpy(), len(samples)

    found, residual = solved(count, controls, 0)  # the job's seed, which the lead has chosen
    assert own_share(found, gradients) < 0.3
    assert residual > 0.1 * max(solved(n, controls, 0)[1] for n in range(told, told + 5))
    assert abs(np.corrcoef(solved(count, losses, 0)[0], true)[0, 1]) < 0.8
    step = 2.0 ** np.floor(np.log2(losses / 2 / np.sqrt(15)))
    assert np.array_equal(np.round(losses / step) * step, losses), "finer digits would tell of single visits"
    config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
    task = task_of(site.executor, config.source, config=config)
    chance = task._base_seed(learner.cohort)
    assert own_share(solved(count, controls, chance)[0], gradients) > 0.8, "who had the site's key would succeed"

    again = ask(built(), TRAIN, ROUNDS, sent)[1]  # of a new process, as after a resume
    assert all(torch.equal(again[name], update[name]) for name in w)
    reply, _ = ask(built(lr=1e-12), TRAIN, ROUNDS, sent)
    assert reply.status == "error" and "training.lr 1e-12 (at least 1e-05)" in reply.reason
    less = learner.cohort.leaving_out({samples[0].visit: "gone"}.get)
    assert task._base_seed(less) != chance, "else an answer before and one after it could differ in one visit"
    other = built(max_grad_norm=0.0).executor
    task = task_of(other, config.source, config=config)
    assert task._base_seed(learner.cohort) != chance, "else two jobs could be told means that differ in one visit"
    with pytest.raises(ConfigError, match="clipped gradients"):
        other.strategy.before_training(task, learner)
