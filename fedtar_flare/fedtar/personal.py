"""A site's patient-adaptive part, restored from its state for drafting."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.data.cohort import Sample
from fedtar_flare.data.splits import key_check
from fedtar_flare.errors import ConfigError
from fedtar_flare.fedtar.config import PatientConfig
from fedtar_flare.fedtar.demographics import DemographicMixture
from fedtar_flare.fedtar.learner import load_patient_part, patient_part
from fedtar_flare.fedtar.patient_lora import PatientLoRA
from fedtar_flare.fedtar.profiles import memberships
from fedtar_flare.learning.drafting import Study, visit_of
from fedtar_flare.protocol.messages import version
from fedtar_flare.settings import build
from fedtar_flare.site.key import derived_key
from fedtar_flare.site.state import SiteState
from fedtar_flare.synthetic.course import synthetic_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PersonalPart:
    """FedTAR's :class:`~fedtar_flare.learning.drafting.PersonalPart`: hypernetwork, projection and mixture.

    ``key`` is the one with which the mixture was fitted, ``about`` what the executor wrote beside it.
    """

    patient: PatientLoRA
    mixture: DemographicMixture
    key: bytes
    about: Mapping[str, Any]

    @classmethod
    def load(cls, model: Any, folder: Path, key: bytes | None, *, run_id: str, round_: int) -> PersonalPart:
        """Restore the part that the site had at the end of the adapter's round.

        It is of an earlier round where the site did not train in the adapter's, and its state shows that it was there
        later: the run then scored the site with this part too.

        Raises:
            ConfigError: the state is of another run, an older release, later rounds alone, or ends before the adapter's
                round; the key is missing or wrong.
            StateError: the state is missing or damaged.
        """
        if folder.parent.name != run_id:
            raise ConfigError(
                f"{folder} is the state of run {folder.parent.name}, the adapter is of run {run_id}; the patient part "
                "fits only the run that it was trained in"
            )
        state = SiteState(folder.parent.parent, folder.parent.name, folder.name)
        arrays, about = state.read("mixture")
        if "patient" not in about:
            raise ConfigError(f"{folder} was written by an older release, which did not keep what drafting needs")
        found = _of_round(state, round_, about["time_steps"])
        config = build(PatientConfig, about["patient"], "patient")
        patient = patient_part(model, config, about["rank"], about["time_steps"], about["seed"])
        load_patient_part(patient, state.read(found)[0])
        mixture = DemographicMixture.from_state({name: value.numpy() for name, value in arrays.items()})
        return cls(patient, mixture, _matching_key(about, key), about)

    def context(self, study: Study) -> AbstractContextManager[Any]:
        """The patient's adapter at this visit; ConfigError where the study lacks patient id or time step."""
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
        return self.patient.adapt(q, torch.tensor([sample.time_step]))


def _of_round(state: SiteState, round_: int, time_steps: int) -> str:
    """The version that was the site's last trained one at the end of a round; ConfigError where it cannot be told."""
    found = state.latest(version(round_, time_steps))
    if found is None or found == version(0, 0):
        raise ConfigError(
            f"{state.folder} has no patient part of round {round_}, the adapter's (versions there: "
            f"{', '.join(state.versions()) or 'none'}). Those of early rounds are deleted while a run goes on, and "
            "one of another round does not fit. Draft with the shared adapter alone (without --state)"
        )
    trained, last = (int(name[:4]) for name in (found, max([found, *state.answered().values()])))
    if last < round_:
        raise ConfigError(
            f"{state.folder} has the patient part of round {trained} and ends with round {last}; the adapter is of "
            f"round {round_}. Either this is an older copy of the state, or the site left the run; the two do not fit. "
            f"Name the state as it was after round {round_}, or draft with the shared adapter alone (without --state)"
        )
    if trained != round_:
        logger.warning("the site did not train in round %d; its patient part is of round %d", round_, trained)
    return found


def _matching_key(about: Mapping[str, Any], key: bytes | None) -> bytes:
    if key is not None:
        if key_check(key) != about["key"]:
            raise ConfigError("this is not the key with which the site's state was made; restore it from its backup")
        return key
    for simulated in (synthetic_key(about["seed"], about["site"]), derived_key(about["seed"], about["site"])):
        if key_check(simulated) == about["key"]:
            return simulated
    raise ConfigError("the patient part of a real site needs the site's hash key (--key local/fedtar.key)")
