"""Base of every executor that works on a site's studies: the site's file, bounds, approval, patients, minimum cell."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.flare.executor import MethodExecutor
from fedtar_flare.flare.run_rules import timeline_of
from fedtar_flare.flare.scalars import send_scalar
from fedtar_flare.learning.config import DataConfig, LoRAConfig, TrainingConfig
from fedtar_flare.models.config import preset as model_preset
from fedtar_flare.progress import Progress
from fedtar_flare.protocol.messages import TaskHeader
from fedtar_flare.protocol.tasks import HANDSHAKE
from fedtar_flare.settings import Settings, build, digest
from fedtar_flare.site.admission import Asked, admit
from fedtar_flare.site.approval import require_approval
from fedtar_flare.site.audit import require_writable
from fedtar_flare.site.place import Site
from fedtar_flare.site.policy import streaming_allowed
from fedtar_flare.site.state import SiteState

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Cohort
    from fedtar_flare.models.report_generator import ReportGenerator
    from fedtar_flare.site.site_file import SiteConfig

PRODUCTION_MIN_CELL = 5
"""Fewest distinct patients of a split at a step, at a real site whose file sets no ``min_cell``."""


class StudyExecutor(MethodExecutor):
    """Opens a site for a task, in the order in which a site may refuse; what is learnt is the subclass's.

    What one task needs of another is on disk (:class:`SiteState`), because each may run in a new process.

    Args:
        model: settings that override those of the model preset (see :mod:`fedtar_flare.models.config`).
        lora, data: settings of :class:`LoRAConfig` and :class:`DataConfig`.
        training: settings of :attr:`training_class`.
        seed: all randomness derives from it, the site's name, the round, the step and the task.
        torch_threads: threads of one task; equal threads give equal bits.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """

    training_class: ClassVar[type[Settings]] = TrainingConfig

    def __init__(
        self,
        preset: str = "small",
        model: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        seed: int = 0,
        torch_threads: int = 1,
    ):
        super().__init__()
        if isinstance(torch_threads, bool) or not isinstance(torch_threads, int) or torch_threads < 1:
            raise ConfigError(f"torch_threads must be a whole number of at least 1, not {torch_threads!r}")
        self.preset, self.model = preset, model
        self.lora, self.training, self.data = lora, training, data
        self.seed, self.torch_threads = seed, torch_threads
        self.model_config = model_preset(preset, **(model or {}))
        self.lora_config = build(LoRAConfig, lora, "lora")
        self.training_config: Any = build(self.training_class, training, "training")
        self.data_config = build(DataConfig, data, "data")
        self._config: SiteConfig

    # ------------------------------------------------------------------ what a method may change
    def method_settings(self) -> tuple[Any, ...]:
        """Settings beside the shared ones that must be the same at every site."""
        return ()

    def extend(self, model: ReportGenerator) -> None:
        """Add to the base model what the learner adds, so that the sizes of an exchange can be told without data."""

    def values_beside(self) -> int:
        """Values of one exchange beside the adapter's and those of ``lora.exchange``."""
        return 0

    def work(self) -> str:
        """What a training task does, in words, for the description of a job."""
        training = self.training_config
        return f"{training.local_steps} updates of {training.batch_size} reports a training task"

    def asked(self, rounds: int, time_steps: int) -> Asked:
        """What the job asks of a site, for its bounds; a method adds what it trains beside the shared adapter."""
        return Asked(
            model=self.model_config,
            lora=self.lora_config,
            training=self.training_config,
            threads=self.torch_threads,
            rounds=rounds,
            time_steps=time_steps,
            extend=self.extend,
        )

    # ------------------------------------------------------------------ opening a site
    def _open(self, task: str, header: TaskHeader, site: Site) -> tuple[SiteState, Cohort]:
        """The site's state of this run and its patients; no data is read for a job or a task that may not come."""
        from fedtar_flare.site.site_file import load_site_config

        self._config = load_site_config(site.name, workspace=site.workspace, simulator=site.simulated)
        self._admit(header, site)
        state = SiteState(site.state_root(self._config.state_dir), header.run_id, site.name)
        if not site.simulated:
            state.require_place()
        if task != HANDSHAKE and not state.versions():
            raise no_state(state, header.after)
        self.contract.check_place(task, header.round, state.answered())
        state.check_run(header.time_steps, timeline_of(self.data_config, header))
        return state, self._patients(self._config, site.name, header, site.workspace)

    def _admit(self, header: TaskHeader, site: Site) -> None:
        """Raise Declined for a job that is beyond the site's bounds, or not approved where it must be."""
        bounds = self._config.policy
        site.limit(bounds.max_seconds)
        admit(self.asked(header.rounds, header.time_steps), bounds)
        if bounds.approval == "required":
            require_approval(site.records, site.app, type(self), self._is_made_by)

    def _is_made_by(self, arguments: Mapping[str, Any]) -> bool:
        """Whether an executor of these arguments does what this one does."""
        return type(self)(**arguments)._settings() == self._settings()

    def _patients(self, config: SiteConfig, name: str, header: TaskHeader, workspace: Path | None = None) -> Cohort:
        """A site's patients, prepared for the model."""
        from fedtar_flare.site.cohort import prepare_site

        cohort, _ = prepare_site(
            config,
            name,
            model=self.model_config,
            data=self.data_config,
            time_steps=header.time_steps,
            seed=self.seed,
            workspace=workspace,
        )
        return cohort

    def _settings(self) -> str:
        """Digest of the settings that must be the same at every site."""
        shared = (self.model_config, self.lora_config, self.training_config, self.data_config)
        return f"{digest(*shared, *self.method_settings())}-{self.seed}"

    def _min_cell(self, site: Site) -> int:
        """The largest of the job's, the site's and its policy's; a real site without one of its own has 5."""
        configured = self._config.min_cell
        if configured is None:
            configured = 1 if site.simulated or self._config.source == "synthetic" else PRODUCTION_MIN_CELL
        return max(configured, self.data_config.min_cell, self._config.policy.min_patients)

    def _tell_updates(self, header: TaskHeader, site: Site, count: int, before: int) -> Callable[[int, float], None]:
        """What runs after each of ``count`` updates: a progress line, and the loss to TensorBoard where allowed.

        ``before``: how many updates the run's earlier tasks made, the place of this task's curve.
        """
        progress = Progress(f"round {header.round}, step {header.step}: update", count, self.logger.info)
        allowed = self._config.stream_losses
        if allowed is None:
            allowed = site.simulated or self._config.source == "synthetic"
        if allowed and not streaming_allowed(site.workspace):
            allowed = False  # what streams passes no filter

        def on_update(number: int, loss: float) -> None:
            progress(number)
            if allowed:
                with site.engine.new_context() as context:
                    require_writable(site, context)  # the listener that sends it may come before the audit's
                    send_scalar(self, context, "loss of local updates", loss, before + number)

        return on_update


def seed_of(seed: int, site: str, round_: int, step: int, task: str) -> int:
    """Seed of one task: the same in every process, independent of what ran before.

    >>> seed_of(0, "site-1", 1, 2, "train") == seed_of(0, "site-1", 1, 2, "train")
    True
    """
    text = f"{seed}/{site}/{round_}/{step}/{task}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def no_state(state: SiteState, after: str) -> DataError:
    """The error of a site whose state of the run is missing."""
    return DataError(
        f"{state.folder} has no state of this run at or before version {after}; it was deleted, or the run began on "
        "another machine. Restore the folder from a backup, or submit the job anew",
        reason="no-site-state",
    )
