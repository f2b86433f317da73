"""The audit holds what truly leaves, after all filters, in names and norms alone; and no byte of it names a patient.

A real hospital's messages are searched for marks planted in its table.
"""

import json
import os
import socket
from unittest.mock import Mock

import pytest
import torch
from canary import DATE, MARK, MARKS, plant
from command import failing, fedtar_here, passing
from flare_context import A, B, context, message, read, task_header
from kits import make_kit
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.utils import fobs

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.protocol.contract import CLOSE_ROUND, HANDSHAKE, TRAIN
from fedtar_flare.protocol.messages import HEADER
from fedtar_flare.site.audit import AuditTrail, append, audit_files, read_audit, require_writable, totals, verify
from fedtar_flare.site.context import Site, state_of
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.testing import Hospital


def leave(ctx, shareable, listeners=None):
    """What FLARE's client does after its filters."""
    for listener in listeners or [AuditTrail()]:
        ctx.set_prop("__task_result__", shareable, private=True, sticky=False)
        listener.handle_event(EventType.AFTER_TASK_RESULT_FILTER, ctx)


def entries(kit):
    return read_audit(audit_files(kit))


def tensors():
    return {A: torch.full((2, 3), 2.0), B: torch.ones(3, 2, dtype=torch.bfloat16)}


def test_an_entry_says_everything_and_no_value(tmp_path):
    leave(context(tmp_path), message(tensors(), numbers={"samples": 12}, payload={"counts": {"train": [987654]}}))
    (entry,) = entries(tmp_path)
    place = {"job": "job-1", "site": "site-1", "run": "run", "task": "train", "round": 1, "step": 1}
    what = {"outcome": "passed", "status": "ok", "method": "fedtar", "bytes": 36}
    names = {"numbers": ["samples"], "fields": ["counts"], "other": []}
    assert entry.items() >= (place | what | names).items()
    assert entry["tensors"][0] == {
        "name": A, "group": "adapter", "personal": False,
        "shape": [2, 3], "dtype": "torch.float32", "bytes": 24, "norm": pytest.approx(24**0.5),
    }  # fmt: skip
    assert entry["tensors"][1]["bytes"] == 12 and entry["norm"] == pytest.approx((24 + 6) ** 0.5)
    file = state_of(tmp_path) / "audit" / "job-1.jsonl"
    assert "987654" not in file.read_text() and file.stat().st_mode & 0o077 == 0
    assert json.loads(passing("audit", "--kit", tmp_path, "--json"))["totals"][0]["bytes"] == 36
    assert "no audit" in failing("audit", "--kit", tmp_path / "nothing", code=1)


def test_an_entry_says_what_is_personal(tmp_path, madeup):
    sent = message({A: torch.ones(1), "bank.features": torch.ones(2, 3), "other": torch.ones(1)}, method="madeup")
    leave(context(tmp_path, "learn", header=task_header(method="madeup")), sent)
    leave(context(tmp_path, "learn", header=task_header(method="unheard-of")), sent)
    known, unknown = entries(tmp_path)
    groups = {tensor["name"]: (tensor["group"], tensor["personal"]) for tensor in known["tensors"]}
    assert groups == {A: ("adapter", False), "bank.features": ("rows", True), "other": (None, None)}
    assert (known["method"], unknown["method"]) == ("madeup", "unheard-of")
    assert all(tensor["group"] is None for tensor in unknown["tensors"])
    out = passing("audit", "--kit", tmp_path, "--tensors")
    assert "PERSONAL DATA" in out and "madeup" in out and "no group of the contract" in out


def test_what_the_guard_refused_what_a_filter_of_the_job_adds_afterwards_and_foreign_messages(tmp_path):
    sent, foreign, odd, ctx = message(tensors()), make_reply(ReturnCode.OK), message(tensors()), context(tmp_path)
    unknown = message({"hypernetworks.x": torch.ones(1)}, numbers={"samples": 1})
    leave(ctx, OutboundGuard(["fedtar"]).process(unknown, ctx))
    sent["patients"] = sent["DXO"]["data"]["names"] = ["x"]
    foreign["weights"] = [1, 2]
    odd["DXO"]["meta"] = {HEADER: "text", "note": 1}
    for each in (sent, foreign, odd, make_reply(ReturnCode.EXECUTION_EXCEPTION)):
        leave(context(tmp_path), each, [AuditTrail(), AuditTrail()])  # recorded once, however many listen
    refused, *others, error = entries(tmp_path)
    assert (refused["outcome"], refused["status"], refused["tensors"]) == ("refused", "error", [])
    assert "hypernetworks.x" in refused["reason"]
    assert [entry["other"] for entry in others] == [["names", "patients"], ["weights"], ["note"]]
    assert (error["outcome"], error["status"]) == ("error", "EXECUTION_EXCEPTION")
    (total,) = totals(entries(tmp_path))
    assert [total[name] for name in ("messages", "refused", "errors")] == [5, 1, 1]


def test_totals_by_job_and_a_line_that_a_kill_cut_off_is_taken_away(tmp_path):
    for job in ("one", "two", "two"):
        leave(context(tmp_path, job=job), message(tensors()))
    files = audit_files(tmp_path)
    files[0].write_text(files[0].read_text() + '{"cut')
    sums = {total["job"]: total for total in totals(read_audit(files))}
    assert sums["two"]["messages"] == 2 and sums["two"]["bytes"] == 72 and sums["one"]["tensors"] == 2
    assert "cut off" in verify(files[0]).problem
    leave(context(tmp_path, job="one"), message(tensors()))
    assert (verify(files[0]).lines, verify(files[0]).problem) == (2, "")
    assert sorted(entry["job"] for entry in entries(tmp_path)) == ["one", "one", "two", "two"]
    leave(context(tmp_path / "kit", job="../../outside"), message(tensors()))  # a job's id never becomes a path
    assert [*tmp_path.rglob("*outside*")] == [*(state_of(tmp_path / "kit") / "audit").glob("*.jsonl")]
    files[0].write_text("{cut\n" + files[0].read_text())
    with pytest.raises(FedTARError, match="line 1"):
        read_audit(files)


WHOLE = os.pwrite
FULL = Mock(side_effect=OSError(28, "No space left on device"))
FAULTS = {
    "no fsync": ("fsync", FULL),
    "no file": ("open", FULL),
    "a short write": ("pwrite", lambda handle, data, at: WHOLE(handle, data[: len(data) // 2], at)),
    "a lost write": ("pwrite", lambda handle, data, at: len(data)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_message_that_cannot_be_recorded_is_replaced_by_an_empty_error(tmp_path, monkeypatch, fault):
    leave(context(tmp_path), message(tensors()))
    file = audit_files(tmp_path)[0]
    before = file.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, *FAULTS[fault])
        ctx, sent = context(tmp_path), message(tensors(), numbers={"samples": 12})
        leave(ctx, sent, [AuditTrail(), AuditTrail()])
        with pytest.raises(FedTARError, match="audit") as caught:
            require_writable(Site.of_task(ctx))
        assert str(tmp_path) not in caught.value.public
    assert sent == make_reply(ReturnCode.EXECUTION_EXCEPTION), "neither tensors nor header leave"
    assert file.read_bytes() == before
    leave(context(tmp_path), message(tensors()))
    assert len(entries(tmp_path)) == 2 and not verify(file).problem


def test_a_changed_a_missing_and_an_added_line_break_the_chain(tmp_path):
    file = tmp_path / "a.jsonl"
    digests = [append(file, {"number": number}) for number in range(6)]
    assert verify(file).digest == digests[-1] and verify(file).lines == 6 and not verify(file).problem
    assert "6 lines" in passing("audit", "--kit", file, "--verify")
    lines = file.read_bytes().splitlines(keepends=True)
    for number in range(5):
        for forged in (
            [*lines[:number], lines[number].replace(b"number", b"Number"), *lines[number + 1 :]],
            [*lines[:number], *lines[number + 1 :]],
            [*lines[:number], lines[number], *lines[number:]],
            [*lines[:number], b'{"number": 7}\n', *lines[number + 1 :]],
        ):
            file.write_bytes(b"".join(forged))
            assert verify(file).problem, (number, forged)
        code, out, _ = fedtar_here("audit", "--kit", file, "--verify", "--json")
        assert code == 1 and json.loads(out)[0]["lines"] == number
    file.write_bytes(b"".join(lines[:4]))
    assert not verify(file).problem and verify(file).digest == digests[3] != digests[-1], "the syslog has the last one"


def test_the_site_s_syslog_is_told_of_every_line_and_a_missing_one_stops_nothing(tmp_path):
    kit = make_kit(tmp_path / "kit", f"source: synthetic\nsyslog: {tmp_path / 'log'}\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "log"))
        listener.settimeout(5)
        leave(context(kit), message(tensors(), numbers={"samples": 987654}))
        line = listener.recv(4096).decode()
    assert line.startswith("<110>fedtar: site-1 job-1 train passed 36 bytes ")
    assert line.split()[-1] == verify(audit_files(kit)[0]).digest and "987654" not in line
    (tmp_path / "log").unlink()
    leave(context(kit), message(tensors()))
    (kit / "local" / "fedtar.yaml").write_text("syslog: [\n")  # no site file any more
    leave(context(kit), message(tensors()))
    assert len(entries(kit)) == 3, "whatever the site file says, each message is recorded"


@pytest.fixture
def hospital(tmp_path, own_home):
    """A real site (not simulated) of marked patients."""
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
        leave(ctx, answer, [self.executor])
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
