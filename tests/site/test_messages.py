"""Every byte of every message of one real hospital, searched for marks planted in its table."""

import json
from dataclasses import replace

import pytest
from flare_context import context, read, write_workflow
from kits import make_kit, write_noise
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.signal import Signal
from nvflare.fuel.utils import fobs

from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import TaskHeader, version
from fedtar_flare.site.context import state_of
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.testing import executor_of

MARK, DATE = "canaryqzx", "1987-06"
T = 2
FIRST = TaskHeader("fedtar", "run", 0, 0, 1, T, version(0, 0), initial_site="site-1")


@pytest.fixture
def hospital(tmp_path, monkeypatch):
    """A real site (not simulated) with 14 patients of two radiographs each, marks in every column."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    site_file = f"source: manifest\npath: {MARK}table.csv\npolicy: {{min_patients: 1, min_local_steps: 1}}\n"
    kit = make_kit(tmp_path / f"{MARK}kit", site_file)
    rows = ["patient_id,study_datetime,image,report,age,sex"]
    for number in range(28):
        write_noise(kit / "local" / f"{MARK}{number}.png", number)
        date = f"{DATE}-{number % 28 + 1:02d}T08:00:00"
        text = f"No finding. {MARK}word{number}."
        rows.append(f"{MARK}id{number // 2},{date},{MARK}{number}.png,{text},{30 + number},F")
    rows += [f"{MARK}broken,{DATE}-01,{MARK}missing.png,{MARK},50,M", f"{MARK}none,{DATE}-02,{MARK}2.png, ,50,unknown"]
    rows.append(rows[1])
    (kit / "local" / f"{MARK}table.csv").write_text("\n".join(rows))
    state_of(kit).mkdir(mode=0o700)
    (state_of(kit) / "fedtar.key").write_text("00" * 32)  # splits with patients in each part
    return kit


class Client:
    """A site as FLARE runs it: executor, the site's filters, then the listeners. Keeps every message's bytes."""

    def __init__(self, kit, *filters):
        settings = {"preset": "tiny", "training": {"local_steps": 1, "batch_size": 4}}
        self.executor = executor_of("fedtar", **settings)
        self.kit, self.filters, self.sent = kit, filters, []
        write_workflow(kit / "job-1" / "app", num_rounds=FIRST.rounds, time_steps=T)

    def run(self, task, header, weights=None):
        ctx = context(self.kit, task, header=header, sent=weights, app=self.kit / "job-1" / "app")
        answer = self.executor.execute(task, ctx.get_prop(FLContextKey.TASK_DATA), ctx, Signal())
        for each in self.filters:
            answer = each.process(answer, ctx)
        ctx.set_prop(FLContextKey.TASK_RESULT, answer, private=True, sticky=False)
        self.executor.handle_event(EventType.AFTER_TASK_RESULT_FILTER, ctx)
        self.sent.append(fobs.dumps(answer))
        return read(answer)

    def round(self):
        """Handshake and one whole round; gives the replies."""
        hello, w = self.run(HANDSHAKE, replace(FIRST, evaluate=True))
        replies = [hello]
        for t in range(1, T + 1):
            reply, update = self.run(TRAIN, TaskHeader("fedtar", "run", 1, t, 1, T, version(1, t - 1)), w)
            replies.append(reply)
            w = {name: w[name] + 0.5 * update[name].float() for name in w} if update else w
        reply, _ = self.run(CLOSE_ROUND, TaskHeader("fedtar", "run", 1, T, 1, T, version(1, T), True), w)
        return [*replies, reply]


def marked(sent):
    return [i for i, data in enumerate(sent) for mark in (MARK, DATE, "19870601") if mark.encode() in data]


def test_no_message_holds_a_mark_and_each_is_in_the_audit(hospital):
    client = Client(hospital, OutboundGuard(["fedtar"]))
    replies = client.round()
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
    spoilt = [f"{MARK}column\n", whole.split("\n")[0], whole.replace(".png", ".gone"), whole.replace("1987", "19x87")]
    for broken in (*spoilt, None):
        table.unlink()
        if broken:
            table.write_text(broken)
        client = Client(hospital, OutboundGuard(["fedtar"]))
        reply, weights = client.run(HANDSHAKE, FIRST)
        assert reply.status == "error" and not weights and marked(client.sent) == []
    assert MARK in caplog.text
