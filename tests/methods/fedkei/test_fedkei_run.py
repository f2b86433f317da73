"""FedKEI of two made-up hospitals in one process, from the handshake to the page and what stays at a site."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.files import write_text
from fedtar_flare.curation.unpack import unpack
from fedtar_flare.data.sources.manifest import write_rows
from fedtar_flare.data.sources.tables import rows_of
from fedtar_flare.methods.fedkei.contract import ADAPT, CONTRACT, IMPORTANCE, PROBE, PULL
from fedtar_flare.methods.fedkei.events import EVENTS, Learnt, Mixed
from fedtar_flare.protocol.exchange import check_tensors
from fedtar_flare.protocol.messages import OK, Reply, TaskHeader, version
from fedtar_flare.record.events import SHARED, Start
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime import simulation
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.site.admission import breaches
from fedtar_flare.site.context import home as cache_home
from fedtar_flare.site.site_file import Bounds
from fedtar_flare.site.state import SiteState
from fedtar_flare.testing import Hospital, executor_of

SITES = ("site-1", "site-2")
SETTINGS = {"preset": "tiny", "training": {"epochs": 2, "batch_size": 8}}
SETTINGS |= {"data": {"synthetic_patients": 20, "transforms": [{"name": "GaussianSmoothd", "sigma": 1}]}}
SETTINGS |= {"fedkei": {"tasks": ["effusion", "nodule"], "base": ["none", "cardiomegaly"], "rand_baseline": True}}


@pytest.fixture(scope="module")
def run(without_site_files, tmp_path_factory):
    messages = []
    deliver = simulation.InThisProcess.deliver

    def recording(self, site, task, message):
        answer = deliver(self, site, task, message)
        down, up = FLModelUtils.from_shareable(message), FLModelUtils.from_shareable(answer)
        header, reply = TaskHeader.from_meta(down.meta), Reply.from_meta(up.meta)
        messages.append(SimpleNamespace(task=task, site=site, header=header, reply=reply, up=up.params or {}))
        return answer

    without_site_files.setattr(simulation.InThisProcess, "deliver", recording)
    results = simulation.run_in_process(MethodRecipe("fedkei", **SETTINGS), list(SITES), tmp_path_factory.mktemp("run"))
    return SimpleNamespace(results=results, events=read_events(results, (*SHARED, *EVENTS)), messages=messages)


def test_every_site_learns_every_task_and_the_second_from_the_pool(run):
    learnt = of_kind(run.events, Learnt)
    assert [sorted(one.sites) for one in learnt] == [list(SITES)] * 2
    for event in learnt:
        for one in event.sites.values():
            assert set(one.counts) == {"train", "validation", "test"} and min(one.counts["train"]) >= 1
            assert not one.n or len(one.auc) == len(one.rand_auc) == len(one.at_epoch) == 3
    first, second = (event.sites.values() for event in learnt)
    assert all(one.auc == one.rand_auc for one in first), "the common start is where the first task begins"
    assert [event.modules for event in of_kind(run.events, Mixed)] == [0, 2]
    assert all(one.mixture_loss != one.start_loss for one in second if one.mixture_loss is not None)


def test_alpha_labels_and_scores_of_images_stay(run):
    agreed = {"schema", "versions", "settings", "counts", "modality", "skipped_studies", "start", "model"}
    fields = {"handshake": agreed, "probe": set(), "adapt": {"counts", "scores"}}
    for message in run.messages:
        assert set(message.reply.payload) == fields[message.task]
        assert "alpha" not in str(message.reply.payload.get("scores", {}).keys())
    state = SiteState(cache_home() / "state", of_kind(run.events, Start)[0].run_id, "site-1")
    module, about = state.read("module-0002")
    assert about["task"] == "nodule"
    scores, whose = state.read("scores-0002")
    assert scores["scores"].shape == scores["rand_scores"].shape == (3, len(whose["labels"]))
    assert len(whose["patients"]) == len(whose["labels"])
    assert all(len(values) >= 1 for values in about["alpha"].values())
    assert state.latest("9999-99") == version(2, 2) and state.has("module-0001")
    sent = next(m.up for m in run.messages if (m.task, m.site, m.header.round) == ("adapt", "site-1", 2))
    start = CheckpointFolder(run.results / "checkpoint").last()[0].weights
    assert all(torch.equal(value, start[name] + sent[name]) for name, value in module.items())


@pytest.mark.parametrize("least", [1, 2])
def test_the_number_of_skipped_updates_is_sent_where_a_cell_is_of_one_patient(least, site_files, tmp_path):
    site = Hospital(tmp_path, method="fedkei", **SETTINGS | {"data": {"synthetic_patients": 20, "min_cell": least}})
    header = TaskHeader("fedkei", "run", 0, 0, 2, 2, after=version(0, 0), initial_site="site-1")
    _, start = site.run("handshake", header)
    header = TaskHeader("fedkei", "run", 1, 2, 2, 2, after=version(1, 1))
    reply, _ = site.run(ADAPT, header, {name: value[None] for name, value in start.items()})
    assert reply.status == OK, reply.reason
    skipped = {"skipped_updates"} if least == 1 else set()
    assert set(reply.numbers) - {"seconds"} == {"samples", "train_loss"} | skipped


def test_a_job_is_held_against_the_bounds_of_a_site():
    job = {"fedkei": SETTINGS["fedkei"]}

    def breached(**changes):
        request = executor_of("fedkei", **(job | changes)).strategy.request(3, 2)
        return " ".join(breaches(request, Bounds()))

    assert not breached()
    few = breached(training={"epochs": 2, "batch_size": 2, "lr": 0.5})
    for words in ("training.epochs 2", "batch_size 2", "reports of an update 4", "training.lr 0.5"):
        assert words in few
    assert "vit_base_patch16_224" in breached(preset="fedkei-paper")
    assert "model.targets" in breached(model={"targets": ["encoder.*embed*"]})


def test_fisher_information_leaves_only_where_the_server_sent_its_sum():
    name = "head.bias"
    sent = {name: torch.zeros(2), IMPORTANCE + name: torch.zeros(2)}
    down = {name: (1, 2), IMPORTANCE + name: (1, 2), PULL + name: (1, 2)}
    check_tensors(CONTRACT, ADAPT, sent, down, sends="difference")
    for tensors, agreed, words in (
        (sent, {name: (1, 2)}, "was not agreed on"),
        ({**sent, PULL + name: torch.zeros(2)}, down, "not allowed to leave"),
    ):
        with pytest.raises(ExchangeError, match=words):
            check_tensors(CONTRACT, ADAPT, tensors, agreed, sends="difference")
    with pytest.raises(ExchangeError, match="not allowed to leave"):
        check_tensors(CONTRACT, PROBE, sent, down, sends="difference")


@pytest.mark.slow
def test_digits_are_learnt(home, tmp_path, monkeypatch):
    """Real handwriting in colour: each site, with every second writer, tells each new digit from those before it."""
    from sklearn.datasets import load_digits

    digits = load_digits(n_class=4)
    bright = np.kron(digits.images / 16, np.ones((4, 4)))
    ink = np.stack([255 * bright, 200 * bright, 120 * bright], axis=-1).astype(np.uint8)
    np.savez(tmp_path / "digits.npz", train_images=ink, train_labels=digits.target[:, None].astype(np.uint8))
    unpacked = unpack(tmp_path / "digits.npz", tmp_path / "digits", most=320)
    assert unpacked.colour and unpacked.pictures == 320
    rows = list(rows_of(unpacked.manifest, ("patient_id", "study_datetime", "image", "labels")))
    rows = [row | {"image": str(unpacked.manifest.parent / row["image"])} for row in rows]
    patients = sorted({row["patient_id"] for row in rows})
    for i in (0, 1):
        write_rows(tmp_path / f"{i}.csv", [row for row in rows if patients.index(row["patient_id"]) % 2 == i])
        about = {"source": "manifest", "path": str(tmp_path / f"{i}.csv"), "options": {"modality": "photograph"}}
        write_text(tmp_path / "sites" / f"site-{i + 1}.yaml", yaml.safe_dump(about))
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    tasks = {"tasks": ["digit-1=class-1", "digit-2=class-2"], "base": ["class-0"], "rand_baseline": False}
    small = {"model": {"slices": 1, "image_size": 32}, "training": {"epochs": 3}, "fedkei": tasks}
    results = simulation.run_in_process(MethodRecipe("fedkei", **small), list(SITES), tmp_path / "run")
    events = read_events(results, (*SHARED, *EVENTS))
    outcomes = [outcome for event in of_kind(events, Learnt) for outcome in event.sites.values()]
    assert len(outcomes) == 4 and all(outcome.n >= 5 for outcome in outcomes)
    assert all(outcome.auc[-1] > 0.8 and 0 <= outcome.membership <= 1 for outcome in outcomes), outcomes
