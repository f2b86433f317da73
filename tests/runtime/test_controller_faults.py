"""What a site that lies, fails or comes late does to a run: it is recorded, and the others go on."""

import errno
import os

from federation import Spoilt

from fedtar_flare.protocol.contract import HANDSHAKE
from fedtar_flare.record.events import End, Joined, Start, Step
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.aggregation import SpilledUpdates
from fedtar_flare.testing import FunctionFederation, QuadraticSite
from fedtar_flare.testing import random_pair as pair


def federation(folder, *others, **settings):
    sites = [QuadraticSite("site-a", [pair(1), pair(2)], samples=3, validation=pair(9)), *others]
    settings = {"num_rounds": 2, "time_steps": 2, "step_time_limit": 1} | settings
    return FunctionFederation(folder, {site.name: site for site in sites}, **settings)


def run(controller):
    controller.run()
    return read_events(controller.results_folder)


def test_a_full_disk_at_the_server_is_its_own_fault_and_ends_the_job(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SpilledUpdates, "add", full)
    end = of_kind(run(federation(tmp_path)), End)[0]
    assert end.status == "failed" and "No space left" in end.reason


def test_an_answer_after_its_account_is_closed_changes_nothing(tmp_path):
    controller = federation(tmp_path, QuadraticSite("site-b", [pair(4), pair(5)], validation=pair(10)))
    answers, original = [], controller.send_model

    def send(callback, **kwargs):
        original(callback=lambda model: answers.append((callback, model)) or callback(model), **kwargs)

    controller.send_model = send
    run(controller)
    callback, model = answers[0]
    before = len(controller.record.path.read_text().splitlines())
    assert callback(model) is False
    lines = controller.record.path.read_text().splitlines()
    assert len(lines) == before + 1 and '"late"' in lines[-1]


def test_a_site_that_comes_late_joins_at_the_next_round(tmp_path):
    late = QuadraticSite("site-b", [pair(4), pair(5)], samples=2, validation=pair(10))
    events = run(federation(tmp_path, late, num_rounds=3, joins={"site-b": 2}))
    assert [(e.round, e.sites) for e in of_kind(events, Joined)] == [(2, ["site-b"])]
    assert [sorted(e.sites) for e in of_kind(events, Step)] == [["site-a"]] * 2 + [["site-a", "site-b"]] * 4


def test_a_member_of_a_resumed_run_is_told_that_it_must_have_its_state(tmp_path):
    headers = []

    def noted(header, reply, tensors):
        headers.append(header)
        return reply, tensors

    first = federation(tmp_path / "first", Spoilt("site-b", noted, HANDSHAKE), num_rounds=1)
    run(first)
    local = [Spoilt(name, noted, HANDSHAKE) for name in ("site-b", "site-c")]
    second = federation(tmp_path / "second", *local, resume_from=str(first.results_folder / "checkpoint"))
    start = of_kind(run(second), Start)[0]
    assert start.sites == ["site-a", "site-b", "site-c"]
    assert [header.member for header in headers] == [False, False, True]  # site-b; then site-c, new, before site-b
