"""A site's patient-adaptive part, restored from its state for drafting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.data.cohort import Sample
from fedtar_flare.data.splits import key_check, synthetic_key
from fedtar_flare.errors import ConfigError
from fedtar_flare.fedtar.config import PatientConfig
from fedtar_flare.fedtar.demographics import DemographicMixture
from fedtar_flare.fedtar.learner import load_patient_part, local_adapter
from fedtar_flare.fedtar.patient_lora import PatientLoRA
from fedtar_flare.fedtar.profiles import memberships
from fedtar_flare.learning.drafting import Study, visit_of
from fedtar_flare.learning.site_diagnosis import load_head
from fedtar_flare.models.adapters.lora import swapped_weights
from fedtar_flare.settings import build
from fedtar_flare.site.key import derived_key
from fedtar_flare.site.trained import state_of_run, trained_version


@dataclass(frozen=True)
class PersonalPart:
    """FedTAR's :class:`~fedtar_flare.learning.drafting.PersonalPart`: hypernetwork, projection and mixture.

    ``key`` is the one with which the mixture was fitted, ``about`` what the executor wrote beside it, ``local`` the
    shared factors as the site trained them beside the patient part, where it kept them.
    """

    model: Any
    patient: PatientLoRA
    local: Mapping[str, torch.Tensor]
    mixture: DemographicMixture
    key: bytes
    about: Mapping[str, Any]

    @classmethod
    def load(cls, model: Any, folder: Path, key: bytes | None, *, run_id: str, round_: int) -> PersonalPart:
        """Restore the part that the site had at the end of the adapter's round.

        It is of an earlier round where the site did not train in the adapter's (:func:`trained_version`).

        Raises:
            ConfigError: the state is of another run, an older release, later rounds alone, or ends before the adapter's
                round; the key is missing or wrong.
            StateError: the state is missing or damaged.
        """
        state = state_of_run(folder, run_id, "patient part")
        arrays, about = state.read("mixture")
        if "patient" not in about:
            raise ConfigError(f"{folder} was written by an older release, which did not keep what drafting needs")
        found = trained_version(state, round_, about["time_steps"], "patient part")
        config = build(PatientConfig, about["patient"], "patient")
        settings = {name: about[name] for name in ("rank", "time_steps", "seed")}
        patient = PatientLoRA(model, config, **settings)
        private = state.read(found)[0]
        load_patient_part(patient, private)
        load_head(model.get_base_model(), private)
        mixture = DemographicMixture.from_state({name: value.numpy() for name, value in arrays.items()})
        return cls(model, patient, local_adapter(private) or {}, mixture, _matching_key(about, key), about)

    @contextmanager
    def context(self, study: Study) -> Iterator[None]:
        """The patient's adapter at this visit, beside the site's own shared factors where it kept them.

        ConfigError where the study lacks patient id or time step.
        """
        if study.patient_id is None:
            raise ConfigError("the patient part needs the patient's id as the site knows it (--patient-id)")
        steps = self.about["time_steps"]
        if study.time_step is None or study.time_step < 1:
            raise ConfigError(
                f"the patient part needs to know which of the patient's visits this is (--time-step, 1 to {steps}; a "
                f"later one counts as {steps})"
            )
        sample = Sample(visit_of(study), None, study.sex, min(study.time_step, steps), "test")
        fields = self.about["patient"]["profile"]
        q = memberships([sample], self.mixture, self.key, self.about["median_age"], tuple(fields))
        with swapped_weights(self.model, self.local), self.patient.adapt(q, torch.tensor([sample.time_step])):
            yield


def _matching_key(about: Mapping[str, Any], key: bytes | None) -> bytes:
    if key is not None:
        if key_check(key) != about["key"]:
            raise ConfigError("this is not the key with which the site's state was made; restore it from its backup")
        return key
    for simulated in (synthetic_key(about["seed"], about["site"]), derived_key(about["seed"], about["site"])):
        if key_check(simulated) == about["key"]:
            return simulated
    raise ConfigError("the patient part of a real site needs the site's hash key (--key local/fedtar.key)")
