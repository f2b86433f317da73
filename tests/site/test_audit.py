"""The audit holds what truly leaves: after all filters, streams too, names and norms alone."""

import json

import pytest
import torch
from command import fedtar_here
from flare_context import A, B, context, message, task_header
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply

from fedtar_flare.errors import FedTARError
from fedtar_flare.protocol.messages import HEADER
from fedtar_flare.site.audit import AuditTrail, audit_files, describe, read_audit, require_writable, totals
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.site.place import Site


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
    assert (entry["job"], entry["site"], entry["run"], entry["task"]) == ("job-1", "site-1", "run", "train")
    assert (entry["round"], entry["step"], entry["outcome"], entry["status"]) == (1, 1, "passed", "ok")
    assert entry["method"] == "fedtar"
    assert entry["tensors"][0] == {
        "name": A, "group": "adapter", "personal": False,
        "shape": [2, 3], "dtype": "torch.float32", "bytes": 24, "norm": pytest.approx(24**0.5),
    }  # fmt: skip
    assert entry["tensors"][1]["bytes"] == 12 and entry["bytes"] == 36
    assert entry["norm"] == pytest.approx((24 + 6) ** 0.5)
    assert entry["numbers"] == ["samples"] and entry["fields"] == ["counts"] and entry["other"] == []
    file = tmp_path / "fedtar_state" / "audit" / "job-1.jsonl"
    assert "987654" not in file.read_text() and file.stat().st_mode & 0o077 == 0


def test_an_entry_says_what_is_personal(tmp_path, madeup):
    sent = message({A: torch.ones(1), "bank.features": torch.ones(2, 3), "other": torch.ones(1)}, method="madeup")
    leave(context(tmp_path, "learn", header=task_header(method="madeup")), sent)
    leave(context(tmp_path, "learn", header=task_header(method="unheard-of")), sent)
    known, unknown = entries(tmp_path)
    groups = {tensor["name"]: (tensor["group"], tensor["personal"]) for tensor in known["tensors"]}
    assert groups == {A: ("adapter", False), "bank.features": ("rows", True), "other": (None, None)}
    assert (known["method"], unknown["method"]) == ("madeup", "unheard-of")
    assert all(tensor["group"] is None for tensor in unknown["tensors"])
    code, out, _ = fedtar_here("audit", tmp_path, "--tensors")
    assert code == 0 and "PERSONAL DATA" in out and "madeup" in out and "no group of the contract" in out


def test_what_the_guard_refused_and_why(tmp_path):
    ctx = context(tmp_path)
    leave(ctx, OutboundGuard().process(message({"hypernetworks.x": torch.ones(1)}, numbers={"samples": 1}), ctx))
    (entry,) = entries(tmp_path)
    assert entry["outcome"] == "refused" and entry["status"] == "error" and not entry["tensors"]
    assert "hypernetworks.x" in entry["reason"]


def test_what_a_filter_of_the_job_adds_afterwards_is_seen(tmp_path):
    ctx = context(tmp_path)
    sent = message(tensors())
    sent["patients"] = ["x"]
    sent["DXO"]["data"]["names"] = ["x"]
    leave(ctx, sent)
    assert entries(tmp_path)[0]["other"] == ["names", "patients"]


def test_one_message_is_recorded_once_however_many_listen(tmp_path):
    ctx = context(tmp_path)
    sent = message(tensors())
    leave(ctx, sent, [AuditTrail(), AuditTrail()])
    leave(ctx, message(tensors()))
    assert len(entries(tmp_path)) == 2


def test_error_codes_and_foreign_messages(tmp_path):
    leave(context(tmp_path), make_reply(ReturnCode.EXECUTION_EXCEPTION))
    foreign = make_reply(ReturnCode.OK)
    foreign["weights"] = [1, 2]
    leave(context(tmp_path), foreign)
    first, second = entries(tmp_path)
    assert (first["outcome"], first["status"]) == ("error", "EXECUTION_EXCEPTION")
    assert second["other"] == ["weights"]


def test_streamed_scalars_are_recorded(tmp_path):
    from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE
    from nvflare.app_common.widgets.streaming import create_analytic_dxo

    from fedtar_flare.flare.scalars import AnalyticsDataType, LogWriterName

    ctx = context(tmp_path)
    dxo = create_analytic_dxo("loss", 0.5, AnalyticsDataType.SCALAR, writer=LogWriterName.TORCH_TB, global_step=1)
    ctx.set_prop("__event_data__", dxo.to_shareable(), private=True, sticky=False)
    AuditTrail().handle_event(ANALYTIC_EVENT_TYPE, ctx)
    (entry,) = entries(tmp_path)
    assert entry["outcome"] == "streamed" and entry["numbers"] == ["loss"]


def test_totals_by_job_and_a_cut_off_last_line(tmp_path):
    for job in ("one", "two", "two"):
        leave(context(tmp_path, job=job), message(tensors()))
    files = audit_files(tmp_path)
    files[0].write_text(files[0].read_text() + '{"cut')
    sums = {total["job"]: total for total in totals(read_audit(files))}
    assert sums["two"]["messages"] == 2 and sums["two"]["bytes"] == 72 and sums["one"]["tensors"] == 2
    files[0].write_text("{cut\n" + files[0].read_text())
    with pytest.raises(FedTARError, match="line 1"):
        read_audit(files)


def test_a_job_id_never_becomes_a_path(tmp_path):
    leave(context(tmp_path, job="../../outside"), message(tensors()))
    assert [f.parent.name for f in tmp_path.rglob("*.jsonl")] == ["audit"]


def test_without_an_audit_nothing_is_done(tmp_path):
    (tmp_path / "fedtar_state").write_text("a file where the folder should be")
    ctx = context(tmp_path)
    with pytest.raises(FedTARError, match="audit") as caught:
        require_writable(Site(ctx), ctx)
    assert str(tmp_path) not in caught.value.public


def test_describe_survives_a_header_of_the_wrong_form(tmp_path):
    sent = message(tensors())
    sent["DXO"]["meta"] = {HEADER: "text", "note": 1}
    assert describe(sent, context(tmp_path))["other"] == ["note"]


def test_the_command_prints_a_table_and_totals(tmp_path):
    leave(context(tmp_path), message(tensors(), numbers={"samples": 1}))
    code, out, _ = fedtar_here("audit", tmp_path, "--tensors")
    assert code == 0 and "samples" in out and A in out and "1 messages" in out
    code, out, _ = fedtar_here("audit", tmp_path, "--json")
    assert code == 0 and json.loads(out)["totals"][0]["bytes"] == 36
    code, _, err = fedtar_here("audit", tmp_path / "nothing")
    assert code == 1 and "no audit" in err
