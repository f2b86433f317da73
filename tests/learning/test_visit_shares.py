"""In the gradient of a low-rank factor, no visit weighs more than another."""

import pytest
import torch
from learners import fedmrg_learner, learner_of

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.adapters.lora import require_modest
from fedtar_flare.models.adapters.visit_shares import LEAST_LENGTH
from fedtar_flare.protocol.exchange import factor

KINDS = (ReportLearner, PatientLearner)


def built(cohort, kind, **settings):
    """A learner of a site with patients, whose factors are not those of the start, so that all have a gradient."""
    learner = learner_of(cohort, kind, has_patients=True, **{"batch_size": 6} | settings)
    generator = torch.Generator().manual_seed(0)
    moved = {n: v + 0.02 * torch.randn(v.shape, generator=generator) for n, v in learner.shared().items()}
    learner.load_shared(moved)
    return learner


def by_rank(learner, samples, factors=None):
    """The gradient of each factor with a row for each rank, of losses that are multiplied by ``factors``."""
    losses = learner.training_losses
    if factors is not None:
        of = dict(zip(map(id, samples), factors, strict=True))
        learner.training_losses = lambda part, *a: losses(part, *a) * torch.tensor([of[id(s)] for s in part])
    learner._accumulate(samples, "seed")
    learner.training_losses = losses
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in learner.shared_parameters.items()}
    return {n: g if factor(n) == "A" else g.T for n, g in grads.items() if factor(n)}


def cosines(some, others):
    """Of two gradients, rank by rank, without factors of which none has a gradient (attention over one slice)."""
    return torch.cat([torch.cosine_similarity(some[n], others[n], dim=1) for n in some if some[n].any()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch", [0, 1, 4])
def test_the_gradient_is_the_sum_of_the_visits_directions_times_their_geometric_mean(cohort, kind, micro_batch):
    learner = built(cohort, kind, micro_batch=micro_batch)
    samples = learner.cohort.samples("train")[:6]
    equal, shares = by_rank(learner, samples), learner.shares
    learner.shares = None
    each = [by_rank(learner, [sample]) for sample in samples]  # of one visit, by autograd alone
    plain = by_rank(learner, samples)
    learner.shares = shares
    for name, rows in equal.items():
        visits = torch.stack([g[name] for g in each]) / len(samples)
        torch.testing.assert_close(visits.sum(0), plain[name], rtol=1e-3, atol=1e-7)
        lengths = visits.norm(dim=2, keepdim=True)
        if not lengths.any():  # a query of attention over one slice
            assert not rows.any()
            continue
        expected = (visits / lengths).sum(0) * lengths.log().mean(0).exp().clamp(min=LEAST_LENGTH)
        torch.testing.assert_close(rows, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_one_visit_whose_gradient_is_a_million_times_the_others_changes_no_direction(cohort, kind):
    """What weights can be made for; without equal shares that visit's gradient is all there is."""
    learner = built(cohort, kind)
    samples = learner.cohort.samples("train")[:6]
    equal, loud = by_rank(learner, samples), by_rank(learner, samples, [1e6, 1, 1, 1, 1, 1])
    assert cosines(equal, loud).min() > 0.999
    learner.shares = None
    loud, alone = by_rank(learner, samples, [1e6, 1, 1, 1, 1, 1]), by_rank(learner, samples[:1])
    assert cosines(alone, loud).min() > 0.999, "else the attack has no point"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_below_adam_s_epsilon_leave_as_signs_not_as_sizes(cohort, kind):
    learner = built(cohort, kind, weight_decay=0.0)
    samples, start = learner.cohort.samples("train")[:6], learner.shared()
    learner.personal_optimizer = None  # what stays at the site is the same in each update

    def moved(scale):
        """How far one update of losses times ``scale`` moves the factors, over the learning rate."""
        losses = learner.training_losses
        learner.load_shared(start)
        learner.training_losses = lambda *a: scale * losses(*a)
        optimizer = learner.shared_optimizer(list(learner.shared_parameters.values()), 1.0)
        assert learner.local_update(samples, "seed", optimizer, start) is not None
        learner.training_losses = losses
        ended = learner.shared()
        return torch.cat([(ended[n] - start[n]).flatten() for n in start if factor(n)]) / learner.training.lr

    usual, tiny = moved(1.0), moved(1e-10)
    acts = usual.abs() > 0.9
    assert acts.float().mean() > 0.8 and (tiny[acts].abs() > 0.9).float().mean() > 0.99
    assert float((tiny.sign() == usual.sign())[acts].float().mean()) > 0.99
    learner.shares = None
    if isinstance(learner, PatientLearner):
        learner.patient.shares = None
    assert moved(1e-10).abs().max() < 0.1, "else the attack has no point"


def test_a_rank_that_too_few_visits_have_a_gradient_of_does_not_move(cohort):
    learner = built(cohort, PatientLearner)
    learner.min_cell = 3
    samples = learner.cohort.samples("train")[:6]
    few, enough = ([1.0] * n + [0.0] * (6 - n) for n in (2, 3))
    assert not any(g.any() for g in by_rank(learner, samples, few).values())
    assert any(g.any() for g in by_rank(learner, samples, enough).values())


def test_only_a_site_with_patients_has_equal_shares_and_validation_is_of_the_plain_gradient(cohort):
    assert learner_of(cohort).shares is None
    assert learner_of(cohort, has_patients=True, noise_multiplier=1.0).shares is None
    learner = built(cohort, PatientLearner)
    gradient = learner.validate().gradient
    learner.shares = learner.patient.shares = None
    assert all(torch.equal(value, gradient[name]) for name, value in learner.validate().gradient.items())


def test_fedmrg_has_equal_shares_in_its_decoder(cohort):
    learner = fedmrg_learner(cohort, has_patients=True)
    learner.train(None, 0)
    assert learner.shares is not None


def test_an_adapter_that_outweighs_its_layer_is_refused_by_the_layer_s_name(cohort):
    learner = built(cohort, ReportLearner)
    require_modest(learner.model, learner.adapter, 20.0)
    weights = learner.shared()
    name = next(n for n in weights if n.endswith("mlp.c_proj.lora_B.weight"))
    learner.load_shared(weights | {name: 1e4 * weights[name]})
    with pytest.raises(ExchangeError, match=r"mlp\.c_proj"):
        require_modest(learner.model, learner.adapter, 20.0)
