"""A server that sends weights and settings by which an update says more than that of many patients together."""

import numpy as np
import pytest
import torch
from hospital_site import write_manifest_site

from fedtar_flare.core.draws import derived_seed
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import batches
from fedtar_flare.methods.scaffold import PREFIX
from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import TaskHeader, version
from fedtar_flare.site.site_file import Bounds, load_site_config
from fedtar_flare.site.state import MOST_REPEATS
from fedtar_flare.testing import Hospital, task_of
from fedtar_flare.testing.hospital import write_workflow

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
