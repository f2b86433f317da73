"""Draft a report for one study from a trained adapter, with the site's own adapters or the shared one alone."""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtar_flare import registry
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import Timeline, read_key
from fedtar_flare.data.cohort import Cohort, Modality, Patient, Sample
from fedtar_flare.imaging.batch import ImageBatch, PriorBatch, collate
from fedtar_flare.imaging.pipeline import prepare
from fedtar_flare.learning.config import LoRAConfig, TrainingConfig
from fedtar_flare.learning.findings import ReadFindings, findings_table
from fedtar_flare.learning.inputs import show_reports
from fedtar_flare.learning.site_model import SiteModel
from fedtar_flare.learning.study import UNKNOWN, Study, study_of, visit_of
from fedtar_flare.models.adapters.hub import adapter_folder
from fedtar_flare.models.adapters.kinds import add_like
from fedtar_flare.models.adapters.lora import load_shared_state
from fedtar_flare.models.adapters.peft_file import (
    DEFAULT_ADAPTER,
    adapter_of,
    at_most,
    read_adapter,
    read_adapter_config,
    read_adapter_info,
)
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.config import preset as model_preset
from fedtar_flare.models.report_generator import ReportGenerator
from fedtar_flare.models.sources import hub_access
from fedtar_flare.models.weights import fingerprint, with_fingerprint
from fedtar_flare.version import __version__

__all__ = ["DISCLAIMER", "Draft", "Drafter", "SavedLearner", "Study", "load_base_model"]

DISCLAIMER = "DRAFT, not for clinical use"


@dataclass(frozen=True)
class Draft:
    """A generated text and its origin. Never a finding by itself: see :data:`DISCLAIMER`.

    Attributes
    ----------
    text, model : without the disclaimer; name of the base model
    run_id, round : of the adapter
    personal : whether the site's own adapters acted
    created : UTC, as ISO 8601
    prior : what was shown of the previous visit
    findings : what was read of each finding that is there or gone: ``finding``, ``side``, ``degree``, ``change`` and
        ``certainty``, with None for what is not known; None where the model reads no findings
    """

    text: str
    run_id: str
    round: int
    model: str
    personal: bool
    created: str
    prior: tuple[str, ...] = ()
    findings: ReadFindings = None

    def to_dict(self) -> dict[str, Any]:
        """Return the draft as JSON primitives.

        Returns
        -------
        dict of str to Any
        """
        return {
            "status": DISCLAIMER,
            "text": self.text,
            "findings": None if self.findings is None else [read.to_dict() for read in self.findings],
            "adapter": {"run_id": self.run_id, "round": self.round},
            "model": self.model,
            "personal_part": self.personal,
            "prior": list(self.prior),
            "created": self.created,
            "fedtar_flare": __version__,
        }

    def to_text(self) -> str:
        """Return the text under its disclaimer, with the findings that were read and the origin below.

        Returns
        -------
        str
        """
        part = "with the site's own adapters" if self.personal else "shared adapter alone"
        if self.prior:
            part += f", shown the previous {' and '.join(self.prior)}"
        table = f"Read, with probabilities:\n{findings_table(self.findings)}\n\n" if self.findings else ""
        return (
            f"*** {DISCLAIMER} ***\n\n{self.text}\n\n{table}"
            f"--\n{self.model}, adapter of run {self.run_id}, round {self.round}, {part}. {self.created}"
        )


@dataclass(frozen=True)
class SavedLearner:
    """A site's state of a run for drafting, as a method's function ``saved_learner`` loads it.

    That function takes the state's folder, the site's hash key (None for a simulated site), and run id and round of the
    adapter; it raises ConfigError for a state that does not belong to them, and StateError for a damaged one.

    Attributes
    ----------
    learner, settings : class that drafts, and its arguments besides those of every site model
    private : weights for its ``load_for_writing``
    time_steps : T of the run
    key : the site's key, where the model knows patients
    precision : in which the site computed
    """

    learner: type[SiteModel] = SiteModel
    settings: Mapping[str, Any] = field(default_factory=dict)
    private: Mapping[str, Tensor] = field(default_factory=dict)
    time_steps: int = 1
    key: bytes = bytes(16)
    precision: str = "auto"


class Drafter:
    """A trained report generator with its adapter, as ``fedtar generate`` loads it: :meth:`draft` writes a report.

    Parameters
    ----------
    adapter : Path or str
        The ``adapter`` folder that a run left, or an adapter's id on the Hugging Face hub.
    state : Path or str, optional
        The site's state of that run, ``<state folder>/<run_id>/<site>``, to write with its patient adapters; None: the
        shared adapter alone.
    key : Path, str or bytes, optional
        The site's key file, ``fedtar.key``, or the key itself; a simulated site needs none.
    model : mapping of str to Any, optional
        Settings of the base model to override, such as ``weights`` or ``encoder_name`` by a local path.
    device : str
        ``auto``, ``cpu``, ``cuda`` or ``cuda:<i>``.
    online : bool
        Whether adapter and parts of the base model that are not on this machine may be fetched from the hub.

    Raises
    ------
    ConfigError
        Not an adapter of this package, another base model, a state of another run, or no or a wrong key.
    StateError
        The site's state is missing or damaged.
    """

    def __init__(
        self,
        adapter: Path | str,
        *,
        state: Path | str | None = None,
        key: Path | str | bytes | None = None,
        model: Mapping[str, Any] | None = None,
        device: str = "auto",
        online: bool = False,
    ):
        if not (key is None or isinstance(key, bytes)):
            key = read_key(Path(key))
        self._adapter = adapter_folder(adapter, online)
        self.info = read_adapter_info(self._adapter)
        self._config = base_config(self.info, model)
        self._method = self.info.get("method", registry.DEFAULT)
        self.personal = state is not None
        saved = SavedLearner()
        if state is not None:
            read_state = registry.method(self._method).saved_learner
            if read_state is None:
                raise ConfigError(f"method '{self._method}' keeps no adapters at a site; draft without --state")
            saved = read_state(Path(state), key, str(self.info["run_id"]), int(self.info["round"]))
        self.time_steps = saved.time_steps
        timeline = Timeline(saved.time_steps, prior=self.info.get("prior", "none"))
        nobody = Patient(UNKNOWN, None, (visit_of(Study(self._adapter, "ct")),))
        self._rank = saved.settings["lora"].rank if "lora" in saved.settings else None
        arguments: dict[str, Any] = {"lora": LoRAConfig(), "training": TrainingConfig(), "seed": 0, **saved.settings}
        with hub_access(online):
            self.site_model: SiteModel = saved.learner(
                model=self._config,
                cohort=Cohort("draft", [nobody], key=saved.key, timeline=timeline),
                device=device,
                precision=saved.precision,
                restored=self._restored,
                **arguments,
            )
        if self.personal:
            self.site_model.load_for_writing(saved.private)

    def _restored(self, base: ReportGenerator) -> Any:
        """The base model with what the method adds to it, and the adapter; ConfigError where it is another base."""
        _check_base(base, self.info, self._adapter)
        extension = self.info.get("extension")
        if extension and (extend := registry.method(self._method).extend) is not None:
            extend(base, extension)
        name = self.info.get("adapter", DEFAULT_ADAPTER)
        weights = read_adapter(self._adapter, name)
        extra = [name for name in weights if adapter_of(name) is None]
        config, weights = at_most(self._rank, read_adapter_config(self._adapter), weights)
        model = add_like(base, config, targets=self._config.lora_targets, extra=extra, name=name)
        load_shared_state(model, weights, name)
        return model

    def draft(self, study: Study | Path | str, **patient: Any) -> Draft:
        """Write a draft of one study by beam search.

        Parameters
        ----------
        study : Study, Path or str
            DICOM folder, file or zip, NIfTI, PNG, JPEG or DICOM radiograph.
        **patient
            What is known beside the image, where ``study`` is a path: the fields of :class:`Study`.

        Returns
        -------
        Draft

        Raises
        ------
        ConfigError
            Too little is known of the patient, or the adapter was not trained on such images or with a previous visit.
        DataError
            The images cannot be used.
        """
        if not isinstance(study, Study):
            study = study_of(Path(study), **patient)
        if (study.lateral or study.prior_lateral) and not self._config.lateral:
            raise ConfigError("this adapter's run had model.lateral=False: draft without --lateral and --prior-lateral")
        require_modality(self.info, study.modality)
        self._check_prior(study)
        if self.personal and self.site_model.knows_patients:
            if study.patient_id is None:
                raise ConfigError("the patient part needs the patient's id as the site knows it (--patient-id)")
            if study.time_step is None or study.time_step < 1:
                raise ConfigError("the patient part needs the visit's number among the patient's (--time-step, from 1)")
        step = min(study.time_step or 1, self.time_steps)
        sample = Sample(visit_of(study), None, study.sex, step, "test")
        images = self._image(study)
        images.prior = self._prior(study)
        text, findings = self.site_model.write(sample, images.to(self.site_model.device))
        return Draft(
            text=text,
            findings=findings,
            run_id=str(self.info["run_id"]),
            round=int(self.info["round"]),
            model=f"fedtar_flare preset '{self._config.preset}'",
            personal=self.personal,
            prior=study.prior,
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    def _check_prior(self, study: Study, shown: int = 1) -> None:
        trained, most = self.info.get("prior", "none"), self.info.get("priors", 1)
        if shown > most:
            raise ConfigError(f"this adapter's run had data.priors={most}: no more previous visits can be shown")
        for kind in study.prior:
            if kind not in Timeline(1, prior=trained).prior_kinds:
                problem = f"this adapter's run had data.prior={trained}, so its model cannot read the {kind} of before"
                raise ConfigError(f"{problem}: draft without --prior-{kind}")
        days = study.prior_days
        if study.prior and days is None:
            raise ConfigError("a previous visit needs the days between the two visits (--prior-days)")
        if days is not None and not (study.prior and 0 < days < math.inf):
            why = "must be above 0, an older study" if study.prior else "it goes with --prior-image or --prior-report"
            raise ConfigError(f"--prior-days {days:g}: {why}")
        if study.before is not None:
            self._check_prior(study.before, shown + 1)

    def _prior(self, study: Study | None) -> PriorBatch | None:
        if study is None or not study.prior:
            return None
        batch = PriorBatch(torch.tensor([study.prior_days], dtype=torch.float32), earlier=self._prior(study.before))
        if study.prior_image is not None:
            batch.images = self._image(replace(study, image=study.prior_image, lateral=study.prior_lateral))
        if study.prior_report is not None:
            show_reports(batch, [study.prior_report], self.site_model.tokenizer)
        return batch

    def _image(self, study: Study) -> ImageBatch:
        with tempfile.TemporaryDirectory() as cache:
            return collate([prepare(visit_of(study), self._config, Path(cache), self.info.get("transforms", ()))])


def load_base_model(adapter: Path | str, *, model: Mapping[str, Any] | None = None) -> ReportGenerator:
    """Load the model that an adapter was trained on, without it: ``peft.PeftModel.from_pretrained(base, adapter)``.

    Nothing is fetched. ConfigError for a folder that is no adapter of this package, or for another base model.

    Parameters
    ----------
    adapter : Path or str
    model : mapping, optional
        As for :class:`Drafter`.

    Returns
    -------
    ReportGenerator
        On the CPU, float32, in eval mode.
    """
    info = read_adapter_info(adapter := adapter_folder(adapter))
    with hub_access(allowed=False):
        base = build_model(base_config(info, model))
    _check_base(base, info, adapter)
    return base


def require_modality(info: Mapping[str, Any], modality: Modality) -> None:
    """Refuse images that the adapter was not trained on, of which it would write nonsense."""
    if (trained := info.get("modality")) and modality not in trained:
        known = " and ".join(trained)
        cure = f"draft from {known} images, or state the study's modality if it is {known}"
        raise ConfigError(f"this adapter was trained on {known} images, not on {modality} images: {cure}")


def base_config(info: Mapping[str, Any], changes: Mapping[str, Any] | None) -> ModelConfig:
    """The settings of the base model that ``fedtar.json`` names, with those that the user overrides."""
    settings = {**info["model"], **(changes or {})}
    return model_preset(str(settings.pop("preset", None)), **settings)


def _check_base(base: ReportGenerator, info: Mapping[str, Any], adapter: Path | str) -> None:
    about = {**info, "config": info["model"], "fingerprint": fingerprint(base)}
    mine = with_fingerprint(about, read_adapter_config(adapter))["fingerprint"]
    if mine != info["fingerprint"]:
        text = f"{adapter} was trained on another base model or with other settings ({info['fingerprint']}) than preset"
        raise ConfigError(f"{text} '{info['model']['preset']}' here ({mine}): name its own (--set model.weights=PATH)")
