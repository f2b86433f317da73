"""Two processes that share every batch learn what one learns, and hold equal bits."""

from contextlib import nullcontext

import learners
import numpy as np
import pytest
import torch
from ranked import in_ranks

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import checksum
from fedtar_flare.data.cells import Timeline
from fedtar_flare.imaging.pipeline import prepare_cohort
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.ranks import ALONE
from fedtar_flare.methods.fedmrg.learner import FedMRGLearner
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.methods.scaffold import PREFIX, ScaffoldConfig, ScaffoldLearner
from fedtar_flare.synthetic.cohort import synthetic_cohort

SCAFFOLD = ScaffoldConfig(optimizer="sgd")
CONTRAST = {"local_steps": 2, "l2g_weight": 0.5, "g2l_weight": 0.5, "contrast_weight": 0.5}


class Plain:
    """Updates are the gradients times a rate, so that what differs in a gradient differs as little in an update."""

    def __init__(self, **others):
        super().__init__(**others)
        if own := self.personal_parameters():
            self.personal_optimizer = torch.optim.SGD(own, lr=0.1)

    def shared_optimizer(self, parameters, epochs):
        return torch.optim.SGD(parameters, lr=0.1)


PlainPatient = type("PlainPatient", (Plain, PatientLearner), {})
PlainFedMRG = type("PlainFedMRG", (Plain, FedMRGLearner), {})


class SmallMemory(Plain, learners.SmallMemory):
    """Rank 1 runs out of memory with more than one report at once."""

    most = property(lambda self: 1 if self.ranks.rank == 1 else 10**6)


class OneBadReport(PatientLearner):
    """The loss of one visit, which one rank has, is not a number; AdamW makes the updates."""

    bad = None

    def training_losses(self, samples, images, seed):
        losses = super().training_losses(samples, images, seed)
        return losses * torch.tensor([float("nan") if s.visit.visit_id == self.bad else 1.0 for s in samples])


def learner_of(folder, kind, ranks=ALONE, device="cpu", **training):
    torch.manual_seed(0)
    whole = synthetic_cohort("site-1", folder=folder, patients=16, timeline=Timeline(2), seed=0)
    cohort = prepare_cohort(whole, learners.MODEL, folder / "prepared")
    more = {"scaffold": SCAFFOLD} if kind is ScaffoldLearner else {}
    make = learners.fedmrg_learner if kind is PlainFedMRG else learners.learner_of
    learner = make(cohort, kind=kind, device=device, ranks=ranks, **{"batch_size": 5} | training, **more)
    if kind is OneBadReport:
        learner.bad = cohort.samples("train", 1)[0].visit.visit_id
    return learner


def learnt(ranks, folder, kind, training, device="cpu"):
    """What a task gives, as plain numbers, and a checksum of all that this process holds after it."""
    learner = learner_of(folder, kind, ranks, device, **training)
    if kind is ScaffoldLearner:
        shared = learner.shared()
        learner.load_shared(shared | {f"{PREFIX}{name}": torch.full_like(v, 0.01) for name, v in shared.items()})
    made: list[int] = []
    trained = learner.train(1, 3, made.append)
    bits = checksum(learner.shared() | learner.private())
    checked = learner.validate()
    ranks.require_equal(learner.shared())
    with pytest.raises(FedTARError, match="different weights") if ranks.size > 1 else nullcontext():
        ranks.require_equal({"x": torch.ones(2) + ranks.rank * 1e-7})
    numbers = (trained.samples, trained.skipped_updates, trained.patients, trained.loss_patients, made)
    losses = [trained.loss, checked.loss, *trained.parts.get("loss_parts", {}).values()]
    arrays = {}
    for part, tensors in (("w", trained.update), ("private", learner.private()), ("gradient", checked.gradient)):
        arrays |= {f"{part} {name}": value.detach().float().cpu().numpy() for name, value in tensors.items()}
    return numbers, losses, arrays, bits, getattr(learner, "sizes", [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    learner_of(made, ReportLearner)  # so that two processes do not make the cohort at once
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "training"),
    [(PlainPatient, {}), (SmallMemory, {}), (ScaffoldLearner, {"batch_size": 4, "micro_batch": 1}),
     (PlainFedMRG, CONTRAST), (PlainFedMRG, CONTRAST | {"batch_size": 1})],
)  # fmt: skip
def test_two_processes_learn_what_one_does(folder, kind, training):
    numbers, losses, expected, _, _ = learnt(ALONE, folder, kind, training)
    first, second = in_ranks(2, learnt, folder, kind, training)
    assert first[3] == second[3], "equal weights and private state, bit for bit"
    assert first[1] == second[1], "and equal losses"
    assert first[0] == numbers and first[1] == pytest.approx(losses, abs=1e-6)
    assert first[2].keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(first[2][name], value, rtol=1e-4, atol=1e-6)
    if kind is SmallMemory:
        assert first[4][0] == 3 and second[4][:4] == [2, 2, 1, 1], "only the rank without memory halves"
        assert max(first[4][1:]) == 3 and max(second[4][2:]) == 1


@pytest.mark.slow
def test_an_update_that_is_not_finite_on_one_rank_is_skipped_by_all(folder):
    numbers = learnt(ALONE, folder, OneBadReport, {})[0]
    first, second = in_ranks(2, learnt, folder, OneBadReport, {})
    assert first[3] == second[3], "equal bits"
    assert first[0] == second[0] == numbers and numbers[1] > 0, "as many skipped as by one process, and the same"


@pytest.mark.gpu
def test_two_gpus_learn_what_one_does(folder):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two CUDA devices are needed; there are {torch.cuda.device_count()}")
    first, second = in_ranks(2, learnt, folder, PlainPatient, {}, "cuda", device="cuda")
    assert first[3] == second[3]
    _, losses, expected, _, _ = learnt(ALONE, folder, PlainPatient, {}, "cuda")
    assert first[1] == pytest.approx(losses, rel=1e-4)
    for name in (name for name in expected if name.startswith("gradient")):
        np.testing.assert_allclose(first[2][name], expected[name], rtol=1e-2, atol=1e-4)
