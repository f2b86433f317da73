"""A site's own diagnosis head: it reads findings and their changes off the images, as the decoder's prompts.

In training the prompts are what the report states, so that the decoder does not remember the image; in generation what
the head reads (PromptMRG, Jin et al., AAAI 2024, and FedMRG). The head stays at its site, or travels
(``shared``): then a site's update leaves out findings that too few of its patients have, and the server takes each
row's mean over the sites that contribute to it (federated learning with partial labels).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import without_prefix
from fedtar_flare.core.settings import Settings, matches
from fedtar_flare.data.cohort import Sample
from fedtar_flare.data.minimum_cell import enough, full_cells, round_to_cell
from fedtar_flare.learning.comparison import (
    COMPARED,
    NONE,
    ComparisonBranch,
    calibrated,
    change_chances,
    change_losses,
    level_losses,
    stated_changes,
)
from fedtar_flare.learning.labels import LabelerName, labeler
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.report_generator import Encoded, ReportGenerator
from fedtar_flare.protocol.contract import HEAD_NAMES
from fedtar_flare.record.events import CERTAINTIES

Read = tuple[Sequence[Sample], Encoded]
"""Samples, and what the encoder gives of them."""
_PREFIX = "diagnosis/"
FEWEST = 2
"""Patients that must have a finding before its row of a head leaves the site."""
OWN_RATE, SHARED_RATE = 3e-3, 2.7e-2
"""Learning rate of a head that stays at its site, and of a shared one (docs/research/experiments.md)."""


class DiagnosisConfig(Settings):
    """Settings of the findings that a site predicts from its images for the decoder."""

    labeler: LabelerName | Literal["auto"] = Field(
        "none",
        description="labeler of the findings in training reports; the same at all sites; 'none': no prompts; 'auto': "
        "'synthetic' for synthetic data, 'none' for other. With 'synthetic' and the model's shipped weights the head "
        "and the prompts begin warm-started, and it reads degrees and changes of what it knows; else from nothing",
    )
    lr: float | None = Field(
        None, gt=0, description=f"AdamW learning rate of the head; None: {OWN_RATE}, {SHARED_RATE} where it is shared"
    )
    epochs: float | None = Field(
        None, gt=0, description="a task of more epochs teaches a shared head at a rate lower in proportion; None: never"
    )
    shared: Literal[True, False, "auto"] = Field(
        False,
        description="exchange the head with the adapter; a site leaves findings out that fewer than 2 of its training "
        "patients have, or fewer than its smallest cell, and each finding's mean is over the others. The site's guard "
        "must let diagnosis.head pass (extra_names). 'auto': at sites with synthetic data, where there is a head",
    )
    certain: float = Field(
        0.5, ge=0, le=1, description="least probability of a change that is told; one below it is called uncertain"
    )
    candidates: int = Field(
        1, ge=1, description="beams of a second search for a report that contradicts its prompt; 1: no second search"
    )
    complete: bool = Field(False, description="say in sentences what a report leaves out of its prompt or contradicts")

    def of(self, source: str) -> "DiagnosisConfig":
        """Decide ``auto`` and the learning rate at a site."""
        synthetic, labeler, shared = source == "synthetic", self.labeler, self.shared
        if labeler == "auto":
            labeler = "synthetic" if synthetic else "none"
        if shared == "auto":
            shared = synthetic and labeler != "none"
        decided = self.replace(labeler=labeler, shared=shared)
        return decided.replace(lr=decided.rate)

    @property
    def rate(self) -> float:
        """Learning rate of the head (AdamW); ``auto`` must have been decided (:meth:`of`)."""
        return self.lr or (SHARED_RATE if self.shared else OWN_RATE)

    def rate_of(self, epochs: float) -> float:
        """Return the learning rate of a shared head in one task."""
        return self.rate if self.epochs is None else self.rate * min(1.0, self.epochs / epochs)

    @property
    def on(self) -> bool:
        """Whether there are findings; ``auto`` must have been decided (:meth:`of`)."""
        if self.labeler == "auto":
            raise ConfigError("diagnosis.labeler is 'auto', and it has not been decided for this site's data")
        return self.labeler != "none"

    def extension(self, model: ModelConfig, seed: int) -> dict[str, Any]:
        """Return the settings of :func:`fedtar_flare.learning.diagnosis.extend`, once the labeler has been decided."""
        assert self.labeler != "auto", "DiagnosisConfig.of decides it"
        fits = self.labeler == "synthetic" and model.weights == "small"
        return {
            "labeler": self.labeler,
            "prompt_classes": "levels",
            "prompt_place": "text" if model.family == "vlm" else "memory",
            "head_weights": "small" if fits else None,
            "candidates": self.candidates,
            "complete": self.complete,
            "certain": self.certain,
            "seed": seed,
        }


class SiteDiagnosis:
    """The head of one site, which is trained from now on, and the initial head."""

    def __init__(self, config: DiagnosisConfig, generator: ReportGenerator):
        self._reader = labeler(config.labeler)
        self._branch: ComparisonBranch = generator.diagnosis
        self._start = copy.deepcopy(self._branch.head).requires_grad_(False)
        self._branch.head.requires_grad_(True)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The head's parameters, by the name under which the site stores them."""
        return {f"{_PREFIX}{name}": parameter for name, parameter in self._branch.head.named_parameters()}

    @property
    def learnt(self) -> bool:
        """Whether the head differs from the initial head."""
        now, start = self._branch.head.state_dict(), self._start.state_dict()
        return any(not torch.equal(now[name], start[name].to(now[name])) for name in now)

    def levels(self, samples: Sequence[Sample]) -> Tensor:
        """Levels (B, D), int64, that the reports of samples state."""
        return self._tensor([self._reader.levels(sample.visit.report) for sample in samples])

    def changes(self, samples: Sequence[Sample]) -> Tensor:
        """Changes (B, D), int64, that the reports of samples state, alone or with those of the visits before."""
        rows = []
        for sample in samples:
            text, levels_of = sample.visit.report, self._reader.stated_levels
            before = None if sample.prior is None else levels_of(sample.prior.report)
            rows.append(stated_changes(text, levels_of(text), before, self._reader))
        return self._tensor(rows)

    def prompts(self, samples: Sequence[Sample]) -> Tensor:
        """Embed what the reports state (B, D, E); a writer that is prompted with every change claims none by itself."""
        return self._branch.embed(self.levels(samples), self.changes(samples).clamp(min=NONE))

    def _tensor(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._branch.embeddings.device)

    def mask_rare_findings(
        self, update: Mapping[str, Tensor], samples: Sequence[Sample], least: int
    ) -> dict[str, Tensor]:
        """Set the head's row of an update to zero for each finding that too few patients have."""
        patients = [sample.visit.patient_id for sample in samples]
        present = (self.levels(samples) > 0).T.tolist()
        having = ([p for p, has in zip(patients, column, strict=True) if has] for column in present)
        rare = torch.tensor([not enough(ids, max(least, FEWEST)) for ids in having])
        masked = dict(update)
        for name, value in update.items():
            if matches(name, [HEAD_NAMES]):
                masked[name] = value.masked_fill(rare.view(-1, *[1] * (value.dim() - 1)), 0)
        return masked

    def losses(self, samples: Sequence[Sample], seen: Encoded) -> Tensor:
        """Cross-entropies (B,) of levels, and of changes where a visit before is shown; none reaches the encoder."""
        now, together, shown = self._branch.by_head(self._branch.head, seen._replace(tokens=seen.tokens.detach()))
        losses = level_losses(now, self.levels(samples))
        if together is None or shown is None:
            return losses
        return losses + change_losses(together, self.changes(samples)) * shown.any(1)

    def _judged(self, seen: Iterable[Read]) -> Iterator[tuple[Sequence[Sample], Callable[[float], Tensor], Tensor]]:
        """Batches with probabilities of the changes (:func:`.calibrated`) and those that reports state, else NONE."""
        for samples, encoded in seen:
            _, together, shown = self._branch.likelihoods(encoded)
            if together is not None and shown is not None:
                present = together.exp().sum((-3, -1))[..., 0] < 0.5
                stated = torch.where(shown, self.changes(samples), NONE)
                yield samples, partial(change_chances, together, present), stated

    @torch.no_grad()
    def calibrate(self, seen: Iterable[Read]) -> None:
        """Set the temperature of the changes by visits that were not trained on, compared with those before."""
        judged = [*self._judged(seen)]
        self._branch.temperature = calibrated([of for _, of, _ in judged], [changes for *_, changes in judged])

    @torch.no_grad()
    def count_by_certainty(self, seen: Iterable[Read], least: int) -> dict[str, list[int]]:
        """Count changes, and those that are right (:attr:`.SiteScores.certainty`), down to multiples of ``least``.

        Only findings with a change of ``least`` patients count, and only probabilities that as many reach.
        """
        changes: list[tuple[str, int, float, bool]] = []  # patient, finding, probability, whether it is right
        for samples, chances, stated in self._judged(seen):
            likeliest, read = chances(self._branch.temperature).max(-1)
            for i, d in ((stated > NONE) & (stated < COMPARED)).nonzero().tolist():
                right = bool(read[i, d] == stated[i, d])
                changes.append((samples[i].visit.patient_id, d, float(likeliest[i, d]), right))
        common, counts = full_cells([(finding, patient) for patient, finding, *_ in changes], least), {}
        for certainty in CERTAINTIES:
            told = [(p, right) for p, d, chance, right in changes if d in common and chance >= certainty / 100]
            if enough([patient for patient, _ in told], least):
                n, rights = len(told), sum(right for _, right in told)
                counts[str(certainty)] = [round_to_cell(n, least), round_to_cell(rights, least)]
        return counts

    @contextmanager
    def with_initial_head(self) -> Iterator[None]:
        """Use the initial head, the same at all sites, while the context is open."""
        mine, self._branch.head = self._branch.head, self._start.to(self._branch.embeddings.device)
        try:
            yield
        finally:
            self._branch.head = mine

    def state(self) -> dict[str, Tensor]:
        """Return copies of :attr:`parameters`, float32 on the CPU."""
        return {name: p.detach().float().cpu().clone() for name, p in self.parameters.items()}


@torch.no_grad()
def load_head(generator: ReportGenerator, state: Mapping[str, Tensor]) -> None:
    """Load the head of a :meth:`SiteDiagnosis.state` into a model that has the branch."""
    head = without_prefix(state, _PREFIX)
    if head and generator.diagnosis is not None:
        generator.diagnosis.head.load_state_dict(generator.diagnosis.head.state_dict() | head)
