"""A site and a job that asks too much: it is declined before a file of the site's data is opened, and nothing leaks."""

import json
import shutil
import socket
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from kits import make_kit
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning import learner as learning
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.training import Trained
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import asset, preset
from fedtar_flare.models.encoders import build_encoder
from fedtar_flare.models.sources import stay_offline
from fedtar_flare.models.weights import save_weights
from fedtar_flare.protocol.messages import ABSTAIN, ERROR, OK
from fedtar_flare.site.admission import admit
from fedtar_flare.site.site_file import Bounds
from fedtar_flare.testing import Hospital
from fedtar_flare.testing.hospital import write_workflow

ATTACK = {
    "model": {"lora_targets": ["decoder.lm_head"]},
    "training": {"local_steps": 1, "batch_size": 1, "max_grad_norm": 1e-9},
}
HARMLESS = {"training": {"local_steps": 4, "batch_size": 4}}


@pytest.fixture(scope="module")
def opened():
    """Paths that this process opens while it is watched."""
    watching: list[list[str]] = []

    def note(event, arguments):
        if watching and event in ("open", "os.listdir", "os.scandir"):
            watching[0].append(str(arguments[0]))

    @contextmanager
    def watched():
        watching.append([])
        yield watching[0]
        watching.clear()

    sys.addaudithook(note)  # never taken away again: quiet unless watching
    return watched


@pytest.fixture
def kit(tmp_path, monkeypatch, own_home):
    """A real hospital's kit, whose data lies in ``tmp_path/secret-archive``."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (data := tmp_path / "secret-archive").mkdir()
    (data / "manifest.csv").write_text("patient_id,study_datetime,image,report\np,2020-01-01,gone.png,Clear.\n")
    return make_kit(tmp_path / "kit", f"source: manifest\npath: {data / 'manifest.csv'}\n")


def test_the_attack_is_declined_with_all_reasons_and_no_file_of_the_data_is_opened(kit, opened):
    hospital = Hospital(kit, name="hospital", simulated=False, preset="small", **ATTACK)
    with opened() as paths:
        reply, weights = hospital.handshake()
    assert reply.status == ERROR and weights is None and reply.reason.startswith("declined by the site's policy: ")
    for word in ("lm_head", "local_steps 1 ", "batch_size 1 ", "max_grad_norm 1e-09", "(at least 5 patients)"):
        assert word in reply.reason
    assert str(kit.parent) not in json.dumps(reply.to_meta())
    assert not [path for path in paths if "secret-archive" in path]
    harmless = Hospital(kit, name="hospital", simulated=False, **HARMLESS)
    with opened() as paths:
        reply, _ = harmless.handshake()
    assert reply.status == ERROR and "declined" not in reply.reason  # its one study is not there
    assert [path for path in paths if "secret-archive" in path], "the test would see it"


@pytest.mark.parametrize("asked", [{"image_changes": 0.5}, {"replay_share": 0.5, "alignment": "period"}])
def test_a_hospital_s_images_are_not_changed_at_random_and_its_periods_are_not_divided(kit, asked):
    (kit / "local" / "fedtar.yaml").write_text("source: synthetic\n")
    data = {"synthetic_patients": 8, "periods": ["2019-04-01"] if len(asked) > 1 else [], **asked}
    reply, weights = Hospital(kit, name="hospital", simulated=False, **HARMLESS | {"data": data}).handshake()
    assert reply.status == ERROR and weights is None
    assert next(iter(asked)) in reply.reason and "for simulations" in reply.reason


def test_what_the_server_says_of_a_run_is_bounded_as_well(kit):
    hospital = Hospital(kit, name="hospital", simulated=False, **HARMLESS)
    for name, value in (("rounds", 201), ("time_steps", 21)):
        header = replace(hospital.header("run", 0, 0, after="0000-00"), **{name: value})
        write_workflow(hospital.app, num_rounds=header.rounds, time_steps=header.time_steps)
        reply, _ = hospital.run("handshake", header)
        assert reply.status == ERROR and f"{name.replace('_', ' ')} {value} (at most" in reply.reason


@pytest.fixture
def trained(tmp_path, site_files):
    """A site of synthetic patients after its handshake, its weights, and how to write its policy."""
    file, site = site_files / "site-1.yaml", Hospital(tmp_path, fresh=False)
    reply, w = site.handshake()
    assert reply.status == OK
    plain = file.read_text()
    return site, w, lambda policy: file.write_text(plain + policy)


def test_a_policy_counts_from_the_next_task_on(trained, monkeypatch, tmp_path):
    site, w, write = trained
    for policy, words in cases(__file__, "policies.yaml").items():
        write(f"policy: {policy}\n")
        reply, update = site.train(w, 1, 1)
        assert reply.status == ERROR and update is None and words in reply.reason
    write("policy: {min_patients: 4}\n")
    behind = Trained(dict(w), samples=16, patients=3, loss=1.0)
    with monkeypatch.context() as patched:
        patched.setattr(ReportLearner, "train", lambda *arguments: behind)
        reply, update = site.train(w, 1, 1)
    assert reply.status == ABSTAIN and update is None
    kept = [p.stem for p in (tmp_path / "state" / "run" / "site-1").glob("0*.safetensors")]
    assert kept == ["0000-00"], "what was trained for nobody is not kept"
    reply, update = site.train(w, 1, 1)
    assert reply.status == OK and update


def test_patients_are_counted_in_the_updates_that_were_made(trained, monkeypatch):
    learner = trained[0].executor.strategy.learner
    owner = [sample.visit.patient_id for sample in learner.cohort.samples("train")]
    twice = next(i for i in range(1, len(owner)) if owner[i] == owner[0])  # the first patient's next visit
    other = next(i for i in range(len(owner)) if owner[i] != owner[0])
    for drawn, patients in (([[0, twice], [0]], 1), ([[0], [other, 0]], 2)):
        monkeypatch.setattr(learning, "batches", lambda *_, drawn=drawn: drawn)
        assert learner.train(None, 0, updates=len(drawn)).patients == patients
    losses = iter([1.0, float("nan")])
    monkeypatch.setattr(learner, "_accumulate", lambda *_: torch.tensor(next(losses)))
    made = learner.train(None, 0, updates=2)
    assert (made.patients, made.skipped_updates) == (1, 1), "a skipped update hides nobody's visit"


def test_a_job_names_a_model_and_the_site_says_where_it_is(tmp_path, site_files, monkeypatch):
    """Mapped to a folder of the site's, it is loaded from there, and no message tells the folder."""
    folder = site_files / "models-of-the-hospital"
    save_weights(build_model(preset("tiny", seed=7)), folder / "model.safetensors")
    shutil.copy(asset("small", "tokenizer.json", "tokenizer"), folder)
    with (site_files / "site-1.yaml").open("a") as file:
        file.write("policy: {models_from: list, models: {start: models-of-the-hospital}}\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reply, w = Hospital(tmp_path, model={"weights": "start", "tokenizer": "start"}).handshake()
    assert reply.status == OK and w
    assert reply.payload["model"]["config"]["weights"] == "start"
    assert "models-of-the-hospital" not in json.dumps(reply.to_meta())
    assert constants.is_offline_mode(), "before any model is loaded"
    assert preset("small").with_local_paths({"small": folder}).weights == "small", "the shipped one"
    for other in (str(folder / "model.safetensors"), "models-of-the-hospital", "."):
        reply, w = Hospital(tmp_path, model={"weights": other}).handshake()
        assert reply.status == ERROR and "not among this site's models" in reply.reason and w is None


@pytest.fixture
def called(monkeypatch):
    """The machines that this process asks for; there is none."""
    names = []

    def nobody(name, *_, **__):
        names.append(name)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return names


@pytest.mark.parametrize("allowed", [True, False])
def test_a_site_calls_no_hub_unless_it_has_said_so(called, tmp_path, allowed):
    """The job names a model that the site knows by name and does not have."""
    names = {"decoder_name": f"nobody/nothing-{allowed}", "tokenizer": "decoder"}
    hospital = Hospital(tmp_path, **HARMLESS, model=names)
    bounds = Bounds(models={names["decoder_name"]: None}, models_from="hub" if allowed else "list")
    with pytest.raises(ConfigError, match="could not be fetched"):
        admit(hospital.executor.strategy.request(3, 3), bounds)
    assert bool(called) is allowed


def test_weights_that_timm_has_at_an_address_of_its_own_are_not_fetched_either(monkeypatch):
    import timm

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    stay_offline()
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: SimpleNamespace(hf_hub_id=None))
    monkeypatch.setattr(timm, "create_model", None)
    with pytest.raises(ConfigError, match="nothing is fetched here"):
        build_encoder(preset("timm", decoder_name=None, tokenizer="small"), load_pretrained=True)
    assert huggingface_hub.is_offline_mode()
