"""Alarms and the recall of each finding, as the page shows them."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from recorded_runs import EAST, NORTH, SOUTH, edit, write_run

from fedtar_flare.reporting.page import write_report


def sections(folder):
    """What each section says, by its anchor, and the rows of its tables."""
    tree = ElementTree.fromstring(write_report(folder).read_text(encoding="utf-8"))
    return {
        section.get("id"): [[" ".join("".join(cell.itertext()).split()) for cell in row] for row in section.iter("tr")]
        for section in tree.iter("section")
    }


def site(*, identical=0.1, mismatched=0.1, length=1.0, findings=None):
    said = {"n": 20, "identical_share": identical, "mismatched_share": mismatched, "length_ratio": length}
    return {"all": said, "findings": findings or {}, "references": {"identical_share": 0.1}}


def known(n, recall):
    return {"known": {"nodule_left": {"n": n, "recall": recall}}, "new": {"cavity": {"n": n, "recall": 0.0}}}


@pytest.fixture
def run(tmp_path):
    """The page of a record with two evaluations of one site."""

    def write(before, after, generic=None):
        folder = write_run(tmp_path, sites=[NORTH], rounds=1)
        edit(folder, "evaluation", at=0, sites={NORTH: before})
        edit(folder, "evaluation", at=1, sites={NORTH: after}, generic={NORTH: generic} if generic else {})
        return sections(folder)

    return write


def test_what_is_raised_says_so_with_its_limit(run):
    said = run(site(findings=known(20, 0.9)), site(identical=0.6, length=0.4, findings=known(20, 0.8)))
    rows = {row[1 if i == 0 else 0]: row[2 if i == 0 else 1 :] for i, row in enumerate(said["alarms"][1:])}
    assert rows["identical reports"][:2] == ["raised: 60 %", "above 35 %"]
    assert rows["other references fit better"][:2] == ["10 %", "above 40 %"]
    assert rows["length ratio"][:2] == ["raised: 0.40", "below 0.60, above 1.50"]
    assert rows["finding recall"][:2] == ["raised: 80 %", "below 88 %"]
    assert all(len(row[-1].split()) > 4 for row in rows.values())


def test_with_the_patient_adapter_and_without(run):
    said = run(site(), site(), generic=site(mismatched=0.5))
    assert said["alarms"][0][2:4] == ["with the patient adapter", "shared adapter alone"]
    assert ["other references fit better", "10 %", "raised: 50 %"] in [row[:3] for row in said["alarms"]]


def test_findings_under_the_minimum_are_blank_and_raise_nothing(run):
    said = run(site(findings=known(4, 0.9)), site(findings=known(4, 0.1)))
    assert "findings" not in said and not any("finding recall" in row for row in said["alarms"])


def test_recall_of_each_finding_by_site(tmp_path):
    said = sections(write_run(tmp_path, content=True, generic=True))
    order = sorted((EAST, NORTH, SOUTH))
    head, *rows = said["findings"]
    assert [name for name in head[1:] if name != "n"] == order
    names = [row[0] for row in rows if row[0] != "finding"]
    of_one = ["known to the warm start", "emphysema", "nodule left", "new to the warm start", "fibrosis"]
    assert names == of_one * 2  # with the patient adapter and without
    fibrosis = next(row for row in rows if row[0] == "fibrosis")
    assert fibrosis[1] == "5" and fibrosis[4:] == [""] * 6  # 4 and 3 reports are under the minimum


def test_content_has_a_table_of_its_own_without_steps(tmp_path):
    said = sections(write_run(tmp_path, content=True))["scores"]
    heads = [i for i, row in enumerate(said) if row[0] == "site"]
    last = said[heads[-1] :]
    assert last[0][3:6] == ["CT-RATE classes F1 (rules)", "change words F1", "finding change F1"]
    assert {row[1] for row in last[1:]} == {"all"} and len(last) == 5
