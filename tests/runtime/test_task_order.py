"""The order of tasks that a contract declares, as a site keeps it: over processes, resumes and late joins."""

from dataclasses import replace

import pytest
from hospital_site import T

from fedtar_flare.core.errors import DataError
from fedtar_flare.methods.fedavg import METHOD
from fedtar_flare.protocol.contract import TRAIN, close_round, handshake, train
from fedtar_flare.protocol.messages import version
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.testing import Hospital

ORDERED = METHOD.derive(
    "ordered", "Ordered", contract={"tasks": (handshake, train, replace(close_round, follows=(TRAIN,)))}
)
"""A round is closed only where something was trained."""


@pytest.fixture(autouse=True)
def _environment(site_files, announce):
    announce(ORDERED)


def hospital(folder, **settings):
    return Hospital(folder, method="ordered", training={"local_steps": 1, "batch_size": 2}, **settings)


def refused(reply, why):
    return reply.status == "error" and why in reply.reason


CLOSED_TOO_EARLY = "task 'close_round' may only follow train, and none was done"


def test_a_task_before_the_one_that_it_follows_is_refused_and_the_same_one_later_is_not(tmp_path):
    site = hospital(tmp_path)  # a new executor for each task
    _, w = site.handshake()
    assert refused(site.close(w, 1)[0], CLOSED_TOO_EARLY)
    for _ in range(2):  # a task may be repeated
        assert site.train(w, 1, 1)[0].status == "ok"
    assert site.close(w, 1)[0].status == "ok"
    resumed = site.handshake(member=True, initial_site="", after=version(1, T))
    assert resumed[0].status == "ok"
    assert site.train(w, 2, 1)[0].status == "ok" and site.close(w, 2)[0].status == "ok"
    joined = site.handshake("later", initial_site="", after=version(2, T))  # a run that is in its third round
    assert joined[0].status == "ok"
    assert refused(site.close(w, 3, run_id="later")[0], CLOSED_TOO_EARLY)
    assert site.train(w, 3, 1, "later")[0].status == "ok" and site.close(w, 3, run_id="later")[0].status == "ok"


def test_an_abstention_is_an_answer_and_a_failure_is_none(tmp_path, monkeypatch):
    site = hospital(tmp_path, data={"synthetic_patients": 16, "min_cell": 1000})

    def fails(*_):
        raise DataError("no score")

    with monkeypatch.context() as patched:
        patched.setattr(ReportSite, "evaluate", fails)
        assert site.handshake(evaluate=True)[0].status == "error"
    assert refused(site.train(None, 1, 1)[0], "task 'train' may only follow handshake, and none was done")
    _, w = site.handshake()
    assert site.train(w, 1, 1)[0].status == "abstain"
    assert site.close(w, 1)[0].status == "ok"
