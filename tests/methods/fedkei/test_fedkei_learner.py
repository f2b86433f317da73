"""PROBE and ADAPT at one site."""

from dataclasses import dataclass, replace

import pytest
import torch
from refused import refused
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.imaging.batch import ImageBatch
from fedtar_flare.methods.fedkei.config import PLANS, LearnerSettings
from fedtar_flare.methods.fedkei.contract import IMPORTANCE, PULL
from fedtar_flare.methods.fedkei.learner import TaskLearner, add_curvature
from fedtar_flare.methods.fedkei.tasks import TaskData, shuffled
from fedtar_flare.metrics.classification import auc
from fedtar_flare.models.adapters.lora import load_shared_state
from fedtar_flare.models.classifier import ClassifierConfig

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
VIT = ClassifierConfig(encoder="vit", image_size=32, slices=1, encoder_config=SIZES)
SETTINGS = LearnerSettings(epochs=2, batch_size=16)
FEDAVG = PLANS["fedavg"]


@dataclass(frozen=True)
class ArrayExamples:
    """Examples in memory: uint8 images (n, 3, H, W), or (n, S, 3, H, W) of S slices each, and labels (n,)."""

    images: torch.Tensor
    labels: torch.Tensor

    @property
    def patients(self):
        return [*map(str, range(len(self.labels)))]

    def batch(self, indices):
        images = self.images[list(indices)]
        images = images[:, None] if images.dim() == 4 else images
        return ImageBatch(images, torch.zeros(images.shape[:2]), torch.ones(images.shape[:2], dtype=torch.bool))


def easy(count, seed):
    """Pictures that any encoder tells apart: the new disease's are brighter."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    light = 30 * (2 * labels - 1) + 20 * torch.randn(count, generator=g)
    images = 128 + light[:, None, None, None] + 25 * torch.randn(count, 3, 32, 32, generator=g)
    return ArrayExamples(images.clamp(0, 255).to(torch.uint8), labels)


DATA = TaskData(easy(48, 1), easy(16, 2), easy(32, 3))


def learner(config=VIT, seed=0, **changes):
    return TaskLearner(config, SETTINGS.replace(**changes), seed=seed)


def centres_of(one, count=3, scale=0.1):
    g = torch.Generator().manual_seed(0)
    return {
        name: torch.stack([value + scale * torch.randn(value.shape, generator=g) for _ in range(count)])
        for name, value in one.start.items()
    }


def start_of(one):
    return {name: value[None] for name, value in one.start.items()}


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def length(adapted):
    return sum(float(value.square().sum()) for value in adapted.difference.values())


def gradient_through_steps(one, stacked, train, task, direct):
    """Gradient of the outer loss in the centres by name, by autograd; the inner gradients are constants."""
    own, eta, everything = one.parameters, one.settings.eta_in, range(len(train.labels))
    names = {id(p): name for name, p in one.classifier.named_parameters()}
    like = next(iter(own.values()))
    heads = {name: name.startswith("head.") for name in own}
    centres = {name: value.to(like).requires_grad_() for name, value in stacked.items()}
    many = len(next(iter(stacked.values())))

    def loss(theta, indices):
        parameters = {names[id(own[n])]: v for n, v in theta.items()}
        logits = functional_call(one.classifier, parameters, (train.batch(indices).to(like.device),))
        return cross_entropy(logits, train.labels[list(indices)])

    def theta_of(alpha):
        return {n: torch.tensordot(alpha[heads[n]], c, 1) for n, c in centres.items()}

    alpha = dict.fromkeys((False, True), torch.full((many,), 1 / many, dtype=like.dtype))
    for batch in [] if direct else shuffled(everything, one.settings.batch_size, one.seed, task, "probe", 0):
        theta = theta_of(alpha)
        gradients = torch.autograd.grad(loss(theta, batch), list(theta.values()))
        moves = {False: 0.0, True: 0.0}
        for (name, c), g in zip(centres.items(), gradients, strict=True):
            moves[heads[name]] = moves[heads[name]] + (c * g[None]).flatten(1).sum(1)
        alpha = {head: alpha[head] - eta * moves[head] for head in alpha}
    whole = loss(theta_of(alpha), everything)
    return dict(zip(centres, torch.autograd.grad(whole, list(centres.values())), strict=True))


@pytest.mark.parametrize("direct", [False, True])
def test_the_gradient_of_a_real_model_is_autograd_through_all_batches(direct):
    one = learner(batch_size=24)
    one.classifier.double()
    stacked = centres_of(one)
    gradients = one.probe(stacked, DATA, 2, direct=direct)
    wanted = gradient_through_steps(one, stacked, DATA.train, 2, direct)
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value.float(), rtol=1e-5, atol=1e-9)


def test_one_centre_of_fixed_weight_is_where_tuning_begins_to_the_bit():
    one = learner()
    centre = centres_of(one, 1)
    found = one.adapt(centre, DATA, 2, FEDAVG)
    load_shared_state(one.classifier, {name: value[0] for name, value in centre.items()})
    assert found.curve[0] == auc(DATA.test.labels.numpy(), one.scores(DATA.test).numpy())
    assert found.alpha == {"adapter": [1.0], "head": [1.0]}


def test_local_objectives():
    one = learner(epochs=1)
    plain = one.adapt(start_of(one), DATA, 1)
    half = one.adapt(start_of(one), DATA, 1, PLANS["ffa_lora"]).difference
    assert all(bool(value.any()) is (".lora_A." not in name) for name, value in half.items())
    assert length(learner(mu=5.0, epochs=1).adapt(start_of(one), DATA, 1, PLANS["fedprox"])) < length(plain)
    assert same(learner(mu=0.0, epochs=1).adapt(start_of(one), DATA, 1, PLANS["fedprox"]).difference, plain.difference)
    other = one.adapt(centres_of(one, 1), DATA, 2, FEDAVG).difference
    for name in ("per_fedavg", "flwf"):
        assert not same(one.adapt(centres_of(one, 1), DATA, 2, PLANS[name]).difference, other)
    first = one.adapt(start_of(one), DATA, 1, PLANS["flwf"])
    assert same(first.difference, plain.difference)  # the common start has nothing to teach


def test_what_cannot_be_learnt_is_refused():
    one = learner()
    broken = start_of(one) | {"head.bias": torch.full((1, 2), float("nan"))}
    for call, reason in ((one.probe, "non-finite-gradient"), (one.adapt, "non-finite-state")):
        with pytest.raises(ExchangeError, match=r"head\.bias"):
            call({name: value for name, value in centres_of(one).items() if name != "head.bias"}, DATA, 1)
        with refused(reason):
            call(broken, DATA, 1)


def test_fisher_information_is_the_mean_of_each_example_s_squared_gradient():
    one = learner()
    rows = [one.gradients(DATA.validation, [i])[1] for i in range(16)]
    for name, value in one.fisher(DATA.validation).items():
        torch.testing.assert_close(value, torch.stack([row[name] for row in rows]).square().mean(0))


def test_the_curvature_s_gradient_is_autograd_of_the_weighted_distances():
    g = torch.Generator().manual_seed(0)
    theta, *modules = (torch.randn(4, generator=g, dtype=torch.float64) for _ in range(4))
    weights = [torch.rand(4, generator=g, dtype=torch.float64) for _ in modules]
    theta.requires_grad_()
    distance = sum((w * (theta - m) ** 2).sum() for w, m in zip(weights, modules, strict=True))
    (wanted,) = torch.autograd.grad(distance / 2, theta)
    found = {"a": torch.zeros(4, dtype=torch.float64)}
    pull = sum(w * m for w, m in zip(weights, modules, strict=True))
    add_curvature(found, {"a": theta}, {f"{IMPORTANCE}a": sum(weights), f"{PULL}a": pull})
    torch.testing.assert_close(found["a"], wanted)


def test_fedcurv_without_weight_is_plain_and_with_weight_stays_near():
    one = learner(epochs=1)
    start, plain = start_of(one), one.adapt(start_of(one), DATA, 1)

    def adapted(weight):
        pulled = {f"{PULL}{name}": weight * value for name, value in start.items()}
        heavy = {f"{IMPORTANCE}{name}": torch.full_like(value, weight) for name, value in start.items()}
        return one.adapt({**start, **heavy, **pulled}, DATA, 1, PLANS["fedcurv"])

    free = adapted(0.0)
    assert same(free.difference, plain.difference) and not plain.importance
    assert set(free.importance) == set(one.start) and all((value >= 0).all() for value in free.importance.values())
    assert length(adapted(5.0)) < length(plain)


@pytest.mark.parametrize("spoilt", [(), (3,)])
def test_reported_losses_are_winsorised_and_updates_left_out_are_counted(spoilt):
    """By a reference of its own: the four largest and the four smallest losses of 48 patients count as the fifth."""
    labels = torch.cat([1 - DATA.train.labels[:4], DATA.train.labels[4:]])
    one, rows = learner(epochs=1, lr=1e-9), []
    one.min_cell, logits_of = 5, one.logits

    def logits(examples, indices):
        found = logits_of(examples, indices)
        if torch.is_grad_enabled():  # an update
            bad = torch.tensor([[i in spoilt] for i in indices])
            rows.append((found.detach().double().log_softmax(1)[range(len(indices)), labels[list(indices)]], bad.any()))
            found = found.masked_fill(bad, float("nan"))
        return found

    one.logits = logits
    found = one.adapt(start_of(one), replace(DATA, train=ArrayExamples(DATA.train.images, labels)), 2, FEDAVG)
    kept = -torch.cat([row for row, bad in rows if not bad])
    low, *_, high = kept.sort().values[4:-4]
    assert found.losses == [pytest.approx(float(kept.clamp(low, high).mean()))] != [pytest.approx(float(kept.mean()))]
    assert found.skipped_updates == len(spoilt) == sum(bool(bad) for _, bad in rows) and len(rows) == 3


def test_membership_is_the_auc_of_training_against_test_images():
    one = learner()
    found = one.adapt(start_of(one), DATA, 1)
    load_shared_state(one.classifier, {name: one.start[name] + value for name, value in found.difference.items()})
    scored = ((DATA.train, one.scores(DATA.train)), (DATA.test, found.scores[-1]))
    right = [torch.where(part.labels == 1, scores, 1 - scores) for part, scores in scored]
    assert found.membership == pytest.approx(auc([1] * 48 + [0] * 32, torch.cat(right).numpy()))
    assert one.adapt(start_of(one), replace(DATA, test=DATA.train), 1).membership == pytest.approx(0.5)
