"""FedMRG in two processes: each contrasts its share of a batch with the whole of it, and all name the same losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranked import in_ranks

from fedtar_flare.data.timeline import Timeline
from fedtar_flare.imaging.pipeline import prepare_cohort
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.learning.ranks import ALONE
from fedtar_flare.methods.fedmrg.config import FedMRGConfig
from fedtar_flare.methods.fedmrg.dual_adapter import copy_broadcast, decoder_targets
from fedtar_flare.methods.fedmrg.learner import HALVES, FedMRGLearner
from fedtar_flare.models.config import preset
from fedtar_flare.synthetic.cohort import synthetic_cohort
from fedtar_flare.tensor_file import checksum

MODEL = preset("tiny", max_length=24, num_beams=1)


def learnt(ranks, home, batch_size):
    """Gradients of both halves of one batch, losses by part of a task, and a checksum of what is held after it."""
    cohort = synthetic_cohort("site-1", folder=home / "synthetic", patients=16, timeline=Timeline(2), seed=0)
    learner = FedMRGLearner(
        model=MODEL.replace(lora_targets=decoder_targets(MODEL.lora_targets)),
        lora=LoRAConfig(exchange=(r"(?:encoder|pooling|projection|diagnosis)\..+",)),
        training=TrainingConfig(local_steps=2, batch_size=batch_size),
        cohort=prepare_cohort(cohort, MODEL, home / "prepared"),
        seed=0,
        fedmrg=FedMRGConfig(distill_weight=0.5, contrast_weight=0.5),
    )
    learner.ranks = ranks
    copy_broadcast(learner.model)
    gradients = {}
    for learner._half in HALVES:
        learner._accumulate(learner.cohort.samples("train")[:batch_size], "s")
        moved = {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}
        gradients |= {f"{learner._half} {name}": gradient.numpy().copy() for name, gradient in moved.items()}
    trained = learner.train(None, 3)
    return gradients, trained.parts["loss_parts"], trained.loss, checksum(learner.shared() | learner.private())


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [5, 1])
def test_two_processes_learn_what_one_does(home, batch_size):
    torch.set_num_threads(1)
    gradients, parts, loss, _ = learnt(ALONE, home, batch_size)
    first, second = in_ranks(2, learnt, home, batch_size)
    assert first[1:] == second[1:], "the same losses, and equal bits"
    assert first[0].keys() == gradients.keys() and parts.keys() == first[1].keys()
    for name, expected in gradients.items():
        np.testing.assert_allclose(first[0][name], expected, rtol=1e-3, atol=1e-6)
    assert first[2] == pytest.approx(loss, rel=1e-4)
    assert first[1] == pytest.approx(parts, rel=1e-3, abs=1e-5)
    assert parts.get("contrast", 0) or batch_size == 1
