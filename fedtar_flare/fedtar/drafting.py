"""Draft a report for one study from a trained adapter: with the site's own patient part, or the shared part alone.

The adapter says which base model it was trained on; another one is refused, since it would write fluent nonsense.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch

from fedtar_flare.data.cohort import Modality, Sample, Sex, Visit
from fedtar_flare.data.splits import key_check
from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.fedtar.config import PatientConfig, build
from fedtar_flare.fedtar.demographics import DemographicMixture
from fedtar_flare.fedtar.patient_lora import PatientLoRA, PatientLoRAConfig
from fedtar_flare.fedtar.profiles import memberships
from fedtar_flare.imaging.batch import collate
from fedtar_flare.imaging.pipeline import InputConfig, prepare
from fedtar_flare.learning.device import choose_device
from fedtar_flare.models.adapters.lora import add_shared_lora, load_shared_state
from fedtar_flare.models.adapters.peft_file import ADAPTER_CONFIG, is_adapter_name, read_adapter, read_adapter_info
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.models.config import preset as model_preset
from fedtar_flare.models.weights import fingerprint
from fedtar_flare.protocol.messages import version
from fedtar_flare.site.state import SiteState
from fedtar_flare.version import __version__

logger = logging.getLogger(__name__)
DISCLAIMER = "DRAFT, not for clinical use"
_UNWRITTEN = "(to be written)"


@dataclass(frozen=True)
class Study:
    """The study that a report is drafted for.

    Args:
        image: DICOM folder, file or zip, NIfTI, PNG, JPEG or DICOM radiograph.
        modality: ``ct`` or ``radiograph``.
        patient_id, age, sex: of the patient at this study, for the patient part; age in years, None when unknown.
        time_step: which visit it is, from 1; None: not told.
    """

    image: Path
    modality: Modality
    patient_id: str | None = None
    age: float | None = None
    sex: Sex | None = None
    time_step: int | None = None


@dataclass(frozen=True)
class Draft:
    """A text with where it comes from. Never a finding by itself: see :data:`DISCLAIMER`."""

    text: str
    run_id: str
    round: int
    model: str
    personal: bool
    created: str

    def to_dict(self) -> dict[str, Any]:
        """As primitives, the disclaimer first."""
        return {
            "status": DISCLAIMER,
            "text": self.text,
            "adapter": {"run_id": self.run_id, "round": self.round},
            "model": self.model,
            "patient_adaptive": self.personal,
            "created": self.created,
            "fedtar_flare": __version__,
        }

    def to_text(self) -> str:
        """The text under its disclaimer, with the origin below."""
        part = "with the site's patient-adaptive part" if self.personal else "shared adapter alone"
        return (
            f"*** {DISCLAIMER} ***\n\n{self.text}\n\n"
            f"--\n{self.model}, adapter of run {self.run_id}, round {self.round}, {part}. {self.created}"
        )


class Drafter:
    """A trained model, ready to draft.

    Args:
        adapter: the ``adapter`` folder that a run left.
        state: the site's state of that run, ``<state folder>/<run_id>/<site>``; None: the shared part alone.
        key: the site's hash key (``fedtar.key``); a simulated site's derives from its seed and needs none.
        model: settings of the base model to override, such as ``weights`` or ``encoder_name`` by a local path.
        device: ``auto``, ``cpu`` or ``cuda[:i]``.

    Raises:
        ConfigError: not an adapter of this package, another base model, a missing or wrong key.
        StateError: the site's state is missing or damaged.
    """

    def __init__(
        self,
        adapter: Path,
        *,
        state: Path | None = None,
        key: bytes | None = None,
        model: Mapping[str, Any] | None = None,
        device: str = "auto",
    ):
        self.info = read_adapter_info(adapter)
        settings = {name: value for name, value in self.info["model"].items() if name != "preset"}
        self._config: ModelConfig = model_preset(self.info["model"]["preset"], **{**settings, **(model or {})})
        self.tokenizer = build_tokenizer(self._config)
        base = build_model(self._config)
        if (mine := fingerprint(base)) != self.info["fingerprint"]:
            raise ConfigError(
                f"{adapter} was trained on another base model: its weights have the fingerprint "
                f"{self.info['fingerprint']}, those of preset '{self._config.preset}' here {mine}. Name the weights "
                "that the run used (--model weights=PATH)"
            )
        self.device = torch.device(choose_device(device, "float32")[0])
        weights = read_adapter(adapter)
        lora = _lora_settings(adapter)
        self.model = add_shared_lora(
            base,
            targets=self._config.lora_targets,
            rank=lora["r"],
            alpha=lora["lora_alpha"],
            seed=0,
            extra=[re.escape(name) for name in weights if not is_adapter_name(name)],
        ).to(self.device)
        load_shared_state(self.model, weights)
        self.patient: PatientLoRA | None = None
        if state is not None:
            self._load_personal(state, key)

    def _load_personal(self, folder: Path, key: bytes | None) -> None:
        state = SiteState(folder.parent.parent, folder.parent.name, folder.name)
        if folder.parent.name != self.info["run_id"]:
            raise ConfigError(
                f"{folder} is the state of run {folder.parent.name}, the adapter is of run {self.info['run_id']}; the "
                "patient part fits only the run that it was trained in"
            )
        arrays, self._about = state.read("mixture")
        if "patient" not in self._about:
            raise ConfigError(f"{folder} was written by an older release, which did not keep what drafting needs")
        wanted = version(self.info["round"], self._about["time_steps"])
        found = state.latest(wanted) or next(iter(state.versions()), None)
        if found is None:
            raise ConfigError(f"{folder} holds no version of the patient part; it was deleted, or never trained")
        if found != wanted:
            logger.warning("the adapter is of version %s; the nearest patient part here is %s", wanted, found)
        self._mixture = DemographicMixture.from_state({name: value.numpy() for name, value in arrays.items()})
        self._key = _matching_key(self._about, key)
        config = build(PatientConfig, self._about["patient"], "patient")
        self._fields = config.profile
        self.patient = PatientLoRA(
            self.model,
            PatientLoRAConfig(
                rank=self._about["rank"],
                scale=config.scale,
                components=config.components,
                embedding_dim=config.embedding_dim,
                time_conditioned=config.time_conditioned,
                time_steps=self._about["time_steps"],
                seed=self._about["seed"],
            ),
        ).to(self.device)
        tensors, _ = state.read(found)
        prefix = "patient/"
        self.patient.load_state_dict({k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)})

    @torch.no_grad()
    def draft(self, study: Study) -> Draft:
        """Write a draft by beam search.

        Raises:
            ConfigError: the patient part needs to know the patient or which visit it is.
            DataError: the images cannot be used.
        """
        visit = Visit(
            patient_id=study.patient_id or "-",
            visit_id="-",
            acquired=datetime(1900, 1, 1),
            image=study.image,
            report=_UNWRITTEN,
            modality=study.modality,
            age=study.age,
        )
        with tempfile.TemporaryDirectory() as cache:
            prepared = prepare(visit, InputConfig(self._config.image_size, self._config.slices), Path(cache))
            images = collate([prepared]).to(self.device)
        with self._adapted(study, visit):
            ids = cast(Any, self.model.get_base_model()).generate(images)
        return Draft(
            text=self.tokenizer.decode(ids[0].tolist()),
            run_id=str(self.info["run_id"]),
            round=int(self.info["round"]),
            model=f"fedtar_flare preset '{self._config.preset}'",
            personal=self.patient is not None,
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    def _adapted(self, study: Study, visit: Visit) -> Any:
        if self.patient is None:
            return nullcontext()
        if study.patient_id is None:
            raise ConfigError("the patient part needs the patient's id as the site knows it (--patient-id)")
        steps = self._about["time_steps"]
        if study.time_step is None or study.time_step < 1:
            raise ConfigError(
                f"the patient part needs to know which of the patient's visits this is (--time-step, 1 to {steps}; a "
                f"later one counts as {steps})"
            )
        step = min(study.time_step, steps)
        sample = Sample(visit, None, study.sex, step, "test")
        q = memberships([sample], self._mixture, self._key, self._about["median_age"], self._fields)
        return self.patient.adapt(q, torch.tensor([step]))


def study_of(image: Path, modality: Modality | None = None, **patient: Any) -> Study:
    """A study on disk; what is not told is read from its DICOM header where it has one.

    Args:
        image: folder or file.
        modality: ``ct`` or ``radiograph``; None: by what it looks like.
        patient: ``patient_id``, ``age``, ``sex``, ``time_step``.

    Raises:
        DataError: nothing there.
    """
    from fedtar_flare.data.sources.fields import PICTURES, age_of, sex_of

    if not image.exists():
        raise DataError(f"{image} is not there", reason="no-image")
    header = first_header(image)
    told = {name: value for name, value in patient.items() if value is not None}
    if header is not None:
        read: dict[str, Any] = {
            "patient_id": str(header.get("PatientID", "")),
            "sex": sex_of(str(header.get("PatientSex", ""))),
        }
        try:
            read["age"] = age_of(str(header.get("PatientAge", "")))
        except DataError:
            read["age"] = None
        told = {**{name: value for name, value in read.items() if value}, **told}
        modality = modality or ("radiograph" if header.get("Modality") in ("CR", "DX") else "ct")
    if modality is None:
        modality = "radiograph" if image.suffix.lower() in PICTURES else "ct"
    return Study(image, modality, **told)


def first_header(image: Path) -> Any:
    """Header of the first readable DICOM file of a study; None when it has none."""
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    files = sorted(path for path in image.rglob("*") if path.is_file()) if image.is_dir() else [image]
    for path in files:
        try:
            return dcmread(path, stop_before_pixels=True)
        except (InvalidDicomError, OSError):
            continue
    return None


def _lora_settings(adapter: Path) -> dict[str, Any]:
    import json

    settings: dict[str, Any] = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return settings


def _matching_key(about: Mapping[str, Any], key: bytes | None) -> bytes:
    """The key with which the mixture was fitted."""
    from fedtar_flare.site.site_file import derived_key
    from fedtar_flare.synthetic.course import synthetic_key

    if key is not None:
        if key_check(key) != about["key"]:
            raise ConfigError("this is not the key with which the site's state was made; restore it from its backup")
        return key
    for simulated in (synthetic_key(about["seed"], about["site"]), derived_key(about["seed"], about["site"])):
        if key_check(simulated) == about["key"]:
            return simulated
    raise ConfigError("the patient part of a real site needs the site's hash key (--key local/fedtar.key)")
