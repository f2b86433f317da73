"""Learners of every kind on a synthetic site."""

import torch

from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods.fedmrg.config import FedMRGConfig
from fedtar_flare.methods.fedmrg.dual_adapter import decoder_targets
from fedtar_flare.methods.fedmrg.learner import FedMRGLearner
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.demographics import fit_mixture
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.config import preset

MODEL = preset("tiny", max_length=16)


def learner_of(cohort, kind=ReportLearner, *, model=MODEL, exchange=(), **others):
    """A learner of a class; ``others`` are settings of its training and arguments of its own."""
    training = {name: others.pop(name) for name in tuple(others) if name in TrainingConfig.model_fields}
    if issubclass(kind, PatientLearner):
        patient = others.setdefault("patient", PatientConfig())
        others.setdefault("mixture", fit_mixture(cohort, patient, 5) if patient.enabled else None)
    training = TrainingConfig(**{"local_steps": 3, "batch_size": 4} | training)
    own = {"model": model, "lora": LoRAConfig(exchange=exchange), "training": training, "cohort": cohort}
    return kind(**own, **{"seed": 3} | others)


def gradients(learner, samples):
    """Loss of a batch and its gradient, of all that is trained, in one vector; what is drawn at random is fixed."""
    learner._random = torch.Generator().manual_seed(0)
    loss = learner._accumulate(samples, "seed")
    trained = [*learner.shared_parameters.values(), *learner.personal_parameters()]
    return loss, torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in trained])


THETA = ("encoder.*", "pooling.*", "projection.*", "diagnosis.*")


def fedmrg_learner(cohort, exchange=THETA, kind=FedMRGLearner, **settings):
    """A learner of FedMRG, with these settings of its training and of the method."""
    model = preset("tiny", max_length=24, num_beams=1)
    own = {name: settings.pop(name) for name in tuple(settings) if name in FedMRGConfig.model_fields}
    others = {"model": model.replace(lora_targets=decoder_targets(model.lora_targets)), "fedmrg": FedMRGConfig(**own)}
    return learner_of(cohort, kind, exchange=exchange, **{"seed": 0} | others | settings)


class SmallMemory(ReportLearner):
    """Runs out of memory with more than so many reports at once, in the loss or (``late``) only when it writes."""

    most, late = 10**6, False

    def report_losses(self, samples, images, personal=True, **others):
        self._require(samples, self.late)
        return super().report_losses(samples, images, personal, **others)

    def generate(self, samples, images, personal=True):
        self._require(samples, False)
        return super().generate(samples, images, personal)

    def _require(self, samples, spared):
        self.sizes = [*getattr(self, "sizes", []), len(samples)]
        if len(samples) > self.most and not spared:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
