"""Every byte of every message of one real hospital, searched for marks planted in its table."""

import json

import pytest
from canary import DATE, MARK, MARKS, plant
from flare_context import context, read
from kits import make_kit
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.signal import Signal
from nvflare.fuel.utils import fobs

from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.site.context import state_of
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.testing import Hospital


@pytest.fixture
def hospital(tmp_path, monkeypatch):
    """A real site (not simulated) of marked patients."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    site_file = f"source: manifest\npath: {MARK}table.csv\npolicy: {{min_patients: 1, min_local_steps: 1}}\n"
    kit = make_kit(tmp_path / f"{MARK}kit", site_file)
    plant(kit / "local")
    state_of(kit).mkdir(mode=0o700)
    (state_of(kit) / "fedtar.key").write_text("00" * 32)  # splits with patients in each part
    return kit


class Client(Hospital):
    """The hospital as FLARE runs it: executor, the site's guard, then the listeners. Keeps every message's bytes."""

    def __init__(self, kit):
        training = {"local_steps": 1, "batch_size": 4}
        super().__init__(kit, fresh=False, simulated=False, training=training, data={})
        self.guard, self.sent = OutboundGuard(["fedtar"]), []

    def run(self, task, header, weights=None):
        ctx = context(self.workspace, task, header=header, sent=weights, app=self.app)
        answer = self.executor.execute(task, ctx.get_prop(FLContextKey.TASK_DATA), ctx, Signal())
        answer = self.guard.process(answer, ctx)
        ctx.set_prop(FLContextKey.TASK_RESULT, answer, private=True, sticky=False)
        self.executor.handle_event(EventType.AFTER_TASK_RESULT_FILTER, ctx)
        self.sent.append(fobs.dumps(answer))
        return read(answer)


def marked(sent):
    return [i for i, data in enumerate(sent) for mark in MARKS if mark.encode() in data]


def test_no_message_holds_a_mark_and_each_is_in_the_audit(hospital):
    client = Client(hospital)
    hello, w = client.handshake(evaluate=True)
    replies = [hello]
    for t in (1, 2):
        reply, update = client.train(w, 1, t)
        replies.append(reply)
        w = {name: w[name] + 0.5 * update[name].float() for name in w} if update else w
    replies.append(client.close(w, 1, evaluate=True)[0])
    assert [reply.status for reply in replies] == ["ok"] * 4, [reply.reason for reply in replies]
    assert replies[0].payload["skipped_studies"] and replies[0].payload["scores"]["all"]["n"] > 0
    assert all(len(data) > 500 for data in client.sent) and marked(client.sent) == []
    assert marked([fobs.dumps({"x": f"a {MARK}"})]) == [0]  # the search sees through the serialiser
    text = (state_of(hospital) / "audit" / "job-1.jsonl").read_text()
    assert [json.loads(line)["task"] for line in text.splitlines()] == [HANDSHAKE, TRAIN, TRAIN, CLOSE_ROUND]
    assert MARK not in text and DATE not in text


def test_errors_at_the_site_name_files_there_and_nothing_in_the_message(hospital, caplog):
    table = hospital / "local" / f"{MARK}table.csv"
    whole = table.read_text()
    spoilt = [f"{MARK}column\n", whole.split("\n")[0], whole.replace(".dcm", ".gone"), whole.replace("1987", "19x87")]
    for broken in (*spoilt, None):
        table.unlink()
        if broken:
            table.write_text(broken)
        client = Client(hospital)
        reply, weights = client.handshake()
        assert reply.status == "error" and not weights and marked(client.sent) == []
    assert MARK in caplog.text
