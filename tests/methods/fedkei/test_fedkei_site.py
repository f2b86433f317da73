"""PROBE and ADAPT at one site."""

from dataclasses import replace

import pytest
import torch
from textures import ArrayExamples
from through_steps import gradient_through_steps

from fedtar_flare.errors import DataError, ExchangeError
from fedtar_flare.methods.fedkei.config import FedKEIConfig
from fedtar_flare.methods.fedkei.examples import TaskData
from fedtar_flare.methods.fedkei.learner import TaskLearner
from fedtar_flare.methods.fedkei.objectives import Curvature, Local, add_curvature
from fedtar_flare.methods.fedkei.tuning import LearnerSettings
from fedtar_flare.models.classifier import ClassifierConfig

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
VIT = ClassifierConfig(encoder="vit", image_size=32, slices=1, encoder_config=SIZES)
SETTINGS = LearnerSettings(epochs=2, batch_size=16)


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


def centres_of(one, count=3, seed=0, scale=0.1):
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.stack([value + scale * torch.randn(value.shape, generator=g) for _ in range(count)])
        for name, value in one.start.items()
    }


def start_of(one):
    return {name: value[None] for name, value in one.start.items()}


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_the_gradient_of_a_real_model_is_autograd_through_all_batches():
    one = learner(batch_size=24)
    one.classifier.double()
    stacked = centres_of(one)
    found = one.probe(stacked, DATA, 2)
    loss, wanted = gradient_through_steps(one, stacked, DATA.train, 2, first_order=True)
    assert found.loss == pytest.approx(loss, abs=1e-9) and found.samples == 48
    for name, value in wanted.items():
        torch.testing.assert_close(found.gradients[name], value.float(), rtol=1e-5, atol=1e-9)


def test_direct_probe_is_the_gradient_at_the_start_times_alpha():
    one = learner()
    stacked = centres_of(one, 2)
    found = one.probe(stacked, DATA, 2, direct=True)
    assert found.loss == pytest.approx(found.start_loss, rel=1e-5)
    assert same(found.gradients, one.probe(stacked, DATA, 7, direct=True).gradients)
    for value in found.gradients.values():
        assert torch.equal(value[0], value[1])


def test_inner_steps_lower_the_loss():
    one = learner(eta_in=0.3)
    probe = one.probe(centres_of(one, scale=0.2), DATA, 2)
    assert probe.loss < probe.start_loss


def test_tuning_is_reproducible_and_depends_on_the_seed_and_the_task():
    one = learner()
    first, again = (one.adapt(start_of(one), DATA, 1, alpha="fixed") for _ in range(2))
    assert same(first.difference, again.difference) and first.curve == again.curve
    assert torch.equal(first.scores, again.scores) and len(first.curve) == 3 == len(first.at_epoch)
    assert not same(first.difference, one.adapt(start_of(one), DATA, 2, alpha="fixed").difference)
    assert not same(first.difference, learner(seed=1).adapt(start_of(one), DATA, 1, alpha="fixed").difference)
    # what was computed before leaves no trace
    one.probe(centres_of(one), DATA, 3)
    assert same(first.difference, one.adapt(start_of(one), DATA, 1, alpha="fixed").difference)


def test_one_centre_of_fixed_weight_is_where_tuning_begins_to_the_bit():
    one = learner()
    centre = {name: value[:1] for name, value in centres_of(one).items()}
    found = one.adapt(centre, DATA, 2, alpha="fixed")
    begun = one.scores_of({name: value[0] for name, value in centre.items()}, DATA.test)
    from fedtar_flare.metrics.classification import auc

    assert found.curve[0] == auc(DATA.test.labels.numpy(), begun.numpy())
    assert found.alpha == {"adapter": (1.0,), "head": (1.0,)}


def test_local_objectives():
    one = learner()
    plain = one.adapt(start_of(one), DATA, 1, alpha="fixed")
    more = one.adapt(start_of(one), DATA, 1, alpha="fixed", local=Local(extra_epochs=3))
    assert more.curve[:3] == plain.curve and len(more.curve) == 6

    half = one.adapt(start_of(one), DATA, 1, alpha="fixed", local=Local("frozen_a")).difference
    assert not any(value.any() for name, value in half.items() if ".lora_A." in name)
    assert all(value.any() for name, value in half.items() if ".lora_A." not in name)
    head = one.adapt(start_of(one), DATA, 1, alpha="fixed", local=Local("head_only")).difference
    assert all(bool(value.any()) is name.startswith("head.") for name, value in head.items())

    def length(found):
        return sum(float(value.square().sum()) for value in found.difference.values())

    near = learner(mu=5.0).adapt(start_of(one), DATA, 1, alpha="fixed", local=Local("proximal"))
    assert length(near) < length(plain)
    assert same(
        learner(mu=0.0).adapt(start_of(one), DATA, 1, alpha="fixed", local=Local("proximal")).difference,
        plain.difference,
    )
    for objective in ("maml", "distil"):
        other = one.adapt(centres_of(one, 1), DATA, 2, alpha="fixed", local=Local(objective))
        assert not same(other.difference, one.adapt(centres_of(one, 1), DATA, 2, alpha="fixed").difference)
    first = one.adapt(start_of(one), DATA, 1, alpha="fixed", local=Local("distil"))
    assert same(first.difference, plain.difference)  # the common start has nothing to teach


def test_a_task_met_before_begins_where_its_module_ended():
    one = learner(epochs=6)
    old = one.adapt(start_of(one), DATA, 1, alpha="fixed")
    module = {name: (one.start[name] + value)[None] for name, value in old.difference.items()}
    assert old.curve[-1] > 0.7
    found = one.adapt(module, DATA, 2)
    assert found.curve[0] == pytest.approx(old.curve[-1], abs=0.02)
    worst = {name: torch.cat([value, start_of(one)[name]]) for name, value in module.items()}
    best = one.adapt(worst, DATA, 2, alpha="best")
    assert best.alpha["adapter"] in ((1.0, 0.0), (0.0, 1.0)) and best.curve[0] > 0.7


def test_the_safeguard_falls_back_from_modules_of_flipped_labels():
    one, flipped = learner(epochs=6), replace(DATA, train=ArrayExamples(DATA.train.images, 1 - DATA.train.labels))
    wrong = one.adapt(start_of(one), flipped, 1, alpha="fixed")
    module = {name: (one.start[name] + value)[None] for name, value in wrong.difference.items()}
    guarded = learner(safeguard="validation")
    found = guarded.adapt(module, DATA, 2, alpha="fixed")
    assert found.fell_back and found.mixture_loss > found.start_loss
    plain = guarded.adapt(start_of(one), DATA, 2, alpha="fixed")
    assert not plain.fell_back and same(found.difference, plain.difference)
    assert not learner().adapt(module, DATA, 2, alpha="fixed").fell_back


def test_what_cannot_be_learnt_is_refused():
    one = learner()
    positive = replace(DATA, train=ArrayExamples(DATA.train.images[:4], torch.ones(4, dtype=torch.int64)))
    for call in (one.probe, one.adapt):
        with pytest.raises(DataError, match="one class only"):
            call(start_of(one), positive, 1)
        with pytest.raises(ExchangeError, match=r"head\.bias"):
            call({name: value for name, value in start_of(one).items() if name != "head.bias"}, DATA, 1)
    broken = start_of(one) | {"head.bias": torch.full((1, 2), float("nan"))}
    with pytest.raises(DataError) as caught:
        one.adapt(broken, DATA, 1, alpha="fixed")
    assert caught.value.reason == "non-finite-state"
    with pytest.raises(DataError) as caught:
        one.probe(broken, DATA, 1)
    assert caught.value.reason == "non-finite-gradient"


def test_splits_may_be_empty_or_of_one_class():
    nothing = ArrayExamples(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    one = learner()
    found = one.adapt(start_of(one), replace(DATA, validation=nothing, test=nothing), 1)
    assert found.curve == (None, None, None) and found.mixture_loss is None and found.scores.shape == (3, 0)


def test_scales_of_keys_and_values_are_tuned_and_those_of_queries_stay():
    one = learner(VIT.replace(adapter="ia3"))
    difference = one.adapt(start_of(one), DATA, 1, alpha="fixed").difference
    moved = [value for name, value in difference.items() if name.endswith("ia3_l")]
    assert moved and all(not value[:32].any() and value[32:].any() for value in moved)


def test_slices_of_a_volume_are_one_example():
    config = ClassifierConfig(encoder="tiny", image_size=32, slices=2)
    images = DATA.train.images.view(24, 2, 3, 32, 32)
    volumes = ArrayExamples(images, torch.arange(24) % 2)
    one = learner(config)
    found = one.adapt(start_of(one), replace(DATA, train=volumes, validation=volumes, test=volumes), 1, alpha="fixed")
    assert found.samples == 24 and all(value is not None for value in found.curve)


def test_a_module_of_random_labels_does_bounded_harm():
    from fedtar_flare.methods.fedkei.plans import PLANS
    from fedtar_flare.methods.fedkei.pool import Pool

    one = learner(epochs=6)
    pool = Pool(one.start)
    noise = torch.randint(0, 2, (48,), generator=torch.Generator().manual_seed(3))
    for site, labels in (("b", DATA.train.labels), ("c", noise)):
        data = replace(DATA, train=ArrayExamples(easy(48, ord(site)).images, labels))
        pool.add(site, 1, one.adapt(start_of(one), data, 1, alpha="fixed").difference)
    rand = one.adapt(start_of(one), DATA, 2, alpha="fixed")
    mixture = PLANS["fedkei"].mixture(pool, 2, FedKEIConfig(clusters=2))
    found = one.probe(mixture.centres(), DATA, 2)
    moved = mixture.step(found.gradients, 0.05)
    assert all(part.distance.max() < 1 for part in moved.parts.values())
    assert one.adapt(moved.centres(), DATA, 2).curve[-1] > rand.curve[-1] - 0.1


def test_fisher_information_is_the_mean_of_each_example_s_squared_gradient():
    one = learner()
    found = one.fisher(DATA.validation)
    rows = [one.gradients(DATA.validation, [i])[1] for i in range(16)]
    for name, value in found.items():
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
    add_curvature(found, {"a": theta}, Curvature({"a": sum(weights)}, {"a": pull}))
    torch.testing.assert_close(found["a"], wanted)


def test_fedcurv_without_weight_is_plain_and_with_weight_stays_near():
    one = learner()
    curved, plain = Local("fisher"), one.adapt(start_of(one), DATA, 1, alpha="fixed")
    heavy = {name: torch.full_like(value, 5.0) for name, value in one.start.items()}
    near = Curvature(heavy, {name: 5.0 * value for name, value in one.start.items()})
    nothing = Curvature(*({name: torch.zeros_like(v) for name, v in one.start.items()} for _ in range(2)))
    free = one.adapt(start_of(one), DATA, 1, alpha="fixed", local=curved, curvature=nothing)
    assert same(free.difference, plain.difference) and not plain.importance
    assert set(free.importance) == set(one.start) and all((value >= 0).all() for value in free.importance.values())
    held = one.adapt(start_of(one), DATA, 1, alpha="fixed", local=curved, curvature=near)
    far, close = (sum(float(v.square().sum()) for v in found.difference.values()) for found in (plain, held))
    assert close < far


def test_membership_is_the_auc_of_training_against_test_images():
    from fedtar_flare.metrics.classification import auc

    one = learner()
    found = one.adapt(start_of(one), DATA, 1, alpha="fixed")
    module = {name: one.start[name] + value for name, value in found.difference.items()}
    right = [
        torch.where(part.labels == 1, scores, 1 - scores)
        for part, scores in ((DATA.train, one.scores_of(module, DATA.train)), (DATA.test, found.scores[-1]))
    ]
    assert found.membership == pytest.approx(auc([1] * 48 + [0] * 32, torch.cat(right).numpy()))
    alike = one.adapt(start_of(one), replace(DATA, test=DATA.train), 1, alpha="fixed")
    assert alike.membership == pytest.approx(0.5)
