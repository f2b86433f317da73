"""A lead who knew which visits each told mean is of could solve for single visits; at a site with patients nobody does.

Karimireddy et al.'s control variates are plain means of gradients, and every loss is a mean over the same batches.
"""

import numpy as np
import pytest
import torch
from flare_context import write_workflow
from hospital_site import write_manifest_site

from fedtar_flare.core.draws import derived_seed
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.training import batches
from fedtar_flare.methods.scaffold import PREFIX
from fedtar_flare.protocol.contract import HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import TaskHeader, version
from fedtar_flare.site.site_file import Bounds, load_site_config
from fedtar_flare.testing import Hospital, task_of

STEPS, SIZE, ROUNDS = 4, 4, 26
RATE = Bounds().min_learning_rate
"""The least that the default bounds of a site with patients allow."""
WORDS = ("small", "large", "left", "effusion", "nodule", "none", "stable", "heart", "lungs", "clear")


@pytest.fixture
def hospital(tmp_path, home, monkeypatch):
    """A site of 27 patients with a radiograph each, and reports of many lengths; its policy is the default one."""
    rng = np.random.default_rng(0)
    reports = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(27)]
    write_manifest_site(tmp_path, home, monkeypatch, reports)

    def build(**training):
        training = {"local_steps": STEPS, "batch_size": SIZE, "lr": RATE, **training}
        settings = {"training": training, "model": {"slices": 1}, "scaffold": {"optimizer": "sgd"}}
        write_workflow(tmp_path / "app", num_rounds=ROUNDS, time_steps=1)  # the job says what it will ask
        return Hospital(tmp_path, fresh=False, simulated=False, method="scaffold", app=tmp_path / "app", **settings)

    return build


def ask(site, task, r, weights=None):
    """A task of round r of a run of one time step; every round is asked from the same weights."""
    more = {"initial_site": site.name, "after": version(0, 0)} if task == HANDSHAKE else {"after": version(r, 0)}
    return site.run(task, TaskHeader(site.method, "run", r, min(r, 1), ROUNDS, 1, **more), weights)


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
    site = hospital()
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

    again = ask(hospital(), TRAIN, ROUNDS, sent)[1]  # of a new process, as after a resume
    assert all(torch.equal(again[name], update[name]) for name in w)
    reply, _ = ask(hospital(lr=1e-12), TRAIN, ROUNDS, sent)
    assert reply.status == "error" and "training.lr 1e-12 (at least 1e-05)" in reply.reason
    less = learner.cohort.leaving_out({samples[0].visit: "gone"}.get)
    assert task._base_seed(less) != chance, "else an answer before and one after it could differ in one visit"
    other = hospital(max_grad_norm=0.0).executor
    task = task_of(other, config.source, config=config)
    assert task._base_seed(learner.cohort) != chance, "else two jobs could be told means that differ in one visit"
    with pytest.raises(ConfigError, match="clipped gradients"):
        other.strategy.before_training(task, learner)
