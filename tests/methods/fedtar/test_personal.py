"""Drafting with FedTAR's personal part: the site's own, of the adapter's run and round, or a refusal."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from learners import MODEL, learner_of
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import key_check
from fedtar_flare.learning.drafting import Drafter, Study
from fedtar_flare.learning.site_diagnosis import DiagnosisConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.demographics import fit_mixture
from fedtar_flare.methods.fedtar.learner import PatientLearner
from fedtar_flare.models.adapters.peft_file import ADAPTER_INFO, write_adapter
from fedtar_flare.models.weights import with_fingerprint
from fedtar_flare.protocol.messages import version
from fedtar_flare.site.state import SiteState

T, SEED, ROUND = 2, 0, 3


@pytest.fixture(scope="module")
def run(cohort, tmp_path_factory):
    """What a run leaves: the adapter of round 3 and one site's state, with a personal part that changes the text."""
    return left_by(cohort, tmp_path_factory.mktemp("run"))


def left_by(cohort, place, diagnosis=None, precision="float32", lora_rank=None, **patient_settings):
    patient = PatientConfig(patients_per_component=1, **patient_settings)
    mixture = fit_mixture(cohort, patient, 5)
    more = {"diagnosis": diagnosis, "precision": precision, "lora_rank": lora_rank}
    learner = learner_of(cohort, PatientLearner, seed=SEED, patient=patient, mixture=mixture, **more)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.personal_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    if patient.local_adapter:
        learner.local = {n: v + 0.05 * torch.randn(v.shape, generator=generator) for n, v in learner.shared().items()}
    state = SiteState(place / "state", "run-1", "site-1")
    about = {
        "median_age": mixture.median_age, "patient": patient.to_dict(), "rank": learner.lora_rank, "time_steps": T,
        "seed": SEED, "site": "site-1", "key": key_check(cohort.key),
    }  # fmt: skip
    state.write("mixture", mixture.state(), about)
    state.note(precision=learner.precision)
    state.save(version(ROUND, T), learner.private(), {})
    info = {"run_id": "run-1", "round": ROUND, "model": MODEL.to_dict()}
    if extension := learner.describe().get("extension"):
        info |= {"method": "fedtar", "extension": extension}
    config = learner.adapter_config()
    described = {**info, "config": info["model"], "fingerprint": learner.fingerprint}
    info["fingerprint"] = with_fingerprint(described, config)["fingerprint"]
    write_adapter(place / "adapter", learner.exchanged({}), config, info)
    sample = cohort.samples("test")[0]
    visit = sample.visit
    study = Study(visit.image, "ct", visit.patient_id, visit.age, sample.sex, time_step=sample.time_step)
    return SimpleNamespace(adapter=place / "adapter", state=state, learner=learner, sample=sample, study=study)


def with_info(run, folder, **changes):
    """The adapter with other words about itself."""
    info = json.loads((run.adapter / ADAPTER_INFO).read_text())
    shutil.copytree(run.adapter, folder)
    (folder / ADAPTER_INFO).write_text(json.dumps(info | changes))
    return folder


KINDS = {
    "mixture": {},
    "profile": {"mixture": False},  # phi is made of the profile, whose length W_proj has; the state knows
    "bfloat16": {"precision": "bfloat16"},
    "head": {"diagnosis": DiagnosisConfig(labeler="synthetic")},
    "local": {"local_adapter": True},  # written beside the adapter as the site trained it
    "local, rank": {"local_adapter": True, "lora_rank": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_what_the_site_s_own_learner_writes(cohort, tmp_path, kind):
    run = left_by(cohort, tmp_path, **KINDS[kind])
    learner, images = run.learner, run.learner.images([run.sample])
    shared, generic = learner.shared(), learner.generate([run.sample], images, False)[0]
    drafter = Drafter(run.adapter, state=run.state.folder, device="cpu")
    with torch.no_grad():
        losses = [model.report_losses([run.sample], images) for model in (drafter.site_model, learner)]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    if learner.local is not None:
        beside_the_server_s = learner.generate([run.sample], images)[0]
        learner.load_shared(learner.local)
        assert learner.generate([run.sample], images)[0] != beside_the_server_s
    draft = drafter.draft(run.study)
    assert draft.text == learner.generate([run.sample], images)[0] != generic
    assert draft.personal and draft.to_dict()["personal_part"] is True
    assert all(torch.equal(value, shared[name]) for name, value in drafter.site_model.shared().items())
    if kind in ("mixture", "head"):  # without the site's state the head is the first one
        draft = Drafter(run.adapter, device="cpu").draft(run.study)
        assert draft.text == generic and not draft.personal and "shared adapter alone" in draft.to_text()


@pytest.mark.parametrize(("changes", "words"), cases(__file__, "refusals.yaml")["adapters"])
def test_an_adapter_of_another_method_run_or_round_is_refused(run, tmp_path, caplog, changes, words):
    named = Drafter(with_info(run, tmp_path / "named", method="fedtar"), state=run.state.folder, device="cpu")
    assert named.personal and isinstance(named.site_model, PatientLearner)
    with pytest.raises(ConfigError, match=words):
        Drafter(with_info(run, tmp_path / "other", **changes), state=run.state.folder, device="cpu")
    assert not caplog.records


def test_a_personal_part_of_an_earlier_round_serves_only_a_site_that_was_absent_in_between(run, tmp_path, caplog):
    late = with_info(run, tmp_path / "late", round=ROUND + 1)
    place = tmp_path / "run-1" / "site-1"
    shutil.copytree(run.state.folder, place)
    state = SiteState(tmp_path, "run-1", "site-1")
    state.add_answered("train", version(ROUND, T))
    state.add_answered("close_round", version(ROUND, T))
    with pytest.raises(ConfigError, match=r"part of round 3 and ends with round 3; the adapter is of round 4.*--state"):
        Drafter(late, state=place, device="cpu")  # a copy of the state from before, or the site left
    state.add_answered("close_round", version(ROUND + 1, T))  # it was there, without a visit to train on
    assert Drafter(late, state=place, device="cpu").draft(run.study).personal
    assert "did not train in round 4; its patient part is of round 3" in caplog.text
    untrained = version(ROUND, T)
    state.save(version(0, 0), *state.read(untrained))
    state.remove(untrained)
    with pytest.raises(ConfigError, match=r"no patient part of round 4.*versions there: 0000-00"):
        Drafter(late, state=place, device="cpu")


def test_the_key_must_be_the_site_s(run):
    with pytest.raises(ConfigError, match="not the key"):
        Drafter(run.adapter, state=run.state.folder, key=b"another key of 16", device="cpu")
