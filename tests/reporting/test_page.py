"""The record of a run as it is read, and the run's page."""

import json
import re
from html import unescape
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_runs import EAST, NORTH, RUN_ID, SITES, SOUTH, edit, write_run

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.methods.fedtar.events import Outer, Residual
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import End, Evaluation, Late, SiteScores, Start
from fedtar_flare.record.log import RunRecord
from fedtar_flare.reporting.format import score
from fedtar_flare.reporting.page import page, write_report
from fedtar_flare.reporting.run import read_run

TRAINING = ["alpha", "residual", "loss"]
SECTIONS = ["scores", "optimisation", *TRAINING, "settings", "participation", "visits", "exchange"]


def page_of(folder):
    """The page's source, its tree, and all that it says to a reader; none fetches or runs anything."""
    html = write_report(folder).read_text(encoding="utf-8")
    tree = ElementTree.fromstring(html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<iframe|<img", html)
    assert {link.get("href")[1:] for link in tree.iter("a")} <= {section.get("id") for section in tree.iter("section")}
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on") or name == "src"]
    assert "default-src 'none'" in html
    return html, tree, " ".join(" ".join(tree.find("body").itertext()).split())


@pytest.mark.parametrize("until", ["start", "warm-start", "step", "rounds", "end"])
@pytest.mark.parametrize("alpha_form", ["softmax", "sigmoid"])
def test_a_run_stopped_anywhere_gives_a_whole_page(tmp_path, until, alpha_form):
    folder = write_run(tmp_path, until=until, time_steps=4)
    edit(folder, "start", settings=read_run(folder).start.settings | {"alpha_form": alpha_form})
    html, tree, said = page_of(folder)
    assert [section.get("id") for section in tree.iter("section")] == SECTIONS
    assert RUN_ID in said and ("completed" if until == "end" else "unfinished") in said
    assert not re.search(r"\b(nan|inf|None)\b", said, re.IGNORECASE)
    assert not re.search(r"\b(nan|none|inf)\b", " ".join(re.findall(r'\b(?:d|x|y|transform)="([^"]*)"', html)))
    assert "neither over patients nor over studies: a test takes the scores of single reports" in said
    assert ("sum 1 (softmax)" if alpha_form == "softmax" else "between 0 and 1 (sigmoid)") in said


def test_hostile_names_and_reasons_do_not_break_the_page(tmp_path):
    names = ["</style><script>alert(1)</script>", "a\x00\x1b[31m\ud800\u202eb", "' onload='x", "&amp;", "{}%s"]
    folder = write_run(tmp_path, sites=sorted(names), rounds=1, until="rounds")
    RunRecord(folder).write(End(status="failed", reason="<img src=x>\n& more"))
    _, _, said = page_of(folder)
    assert "<img src=x> & more" in said and "failed" in said


def test_the_numbers_of_the_run_are_on_it(tmp_path):
    run = read_run(write_run(tmp_path, generic=True))
    html, _, said = page_of(tmp_path)
    tips = unescape(html)
    for scores in (run.shown.sites, run.shown.generic):
        for site in SITES:
            for name in scores[site].all.keys() & SCORES.keys():
                assert score(name, scores[site].all[name], scores[site].all["n"]) in said
    for step in run.steps:
        place = f"round {step.round}, step {step.step}"
        for site, update in step.sites.items():
            assert f"{site}, {place}: {update.samples} visits" in tips
            assert f"{site}, {place}: {update.train_loss:.3f}" in tips
    for one in run.events(Residual):
        taken = f"round {one.round}, step {one.step}: {one.residual_norm:.3g}<"
        assert not one.residual_norm or f"alpha times the mean update, {taken}" in tips
    for validation, outer in zip(run.validations, run.events(Outer), strict=True):
        assert f"all reports, round {validation.round}: {validation.loss:.3f}<" in tips
        assert " ".join(f"{alpha:.3f}" for alpha in outer.alpha_after) in said
    more = ("4 min 12 s", "7.94 MB", "28 ×", "min_cell", "2.15.0", "The shared adapter alone")
    assert all(words in said for words in more)


def test_numbers_under_min_cell_are_blanked_wherever_they_could_be_read_or_worked_out(tmp_path):
    counts = {"train": [30, 3, 8], "validation": [4, 12, 0], "test": [9, 5, 2]}
    folder = write_run(tmp_path, sites=[NORTH])
    edit(folder, "start", counts={NORTH: counts})
    edit(folder, "step", sites={NORTH: {"samples": 3, "seconds": 1.0}}, abstained={}, absent={})
    cells = {"steps": {"1": {"n": 9}, "2": {"n": 5}, "3": {"n": 2}}, "all": {"n": 16, "bleu_4": 0.5}}
    edit(folder, "evaluation", sites={NORTH: cells})
    html, tree, _ = page_of(folder)
    said = {s.get("id"): " ".join(" ".join(s.itertext()).split()) for s in tree.iter("section")}
    assert f"{NORTH} 30 < 5 8 over 38 < 5 12 0 over 12 9 5 < 5 over 14" in said["visits"]
    assert f"{NORTH} {' '.join(['< 5'] * 9)}" in said["participation"] and "3 visits" not in html
    assert "< 5 visits" in unescape(html) and len(set(re.findall(r"--a:([\d.]+)", html))) == 1
    assert "3 < 5 all over 14" in said["scores"]
    edit(folder, "start", min_cell=1)
    said = page_of(folder)[2]
    assert f"{NORTH} 30 3 8 41 4 12 0 16 9 5 2 16" in said and "3 2" in said


def test_risk_and_coverage_of_changes_are_one_chart_with_a_line_for_each_site_that_reads_any(tmp_path):
    title, plain = "Changes between visits: risk and coverage", page_of(write_run(tmp_path / "plain"))[0]
    html, tree, _ = page_of(write_run(tmp_path / "read", content=True))
    charts = [figure for figure in tree.iter("figure") if figure.find("figcaption").text == title]
    assert len(charts) == 1 and title not in plain
    said = " ".join(charts[0].itertext())
    assert "changes told, %" in said and "wrong of those told, %" in said
    block = rf'<ul class="legend">((?:(?!<ul).)*)</ul>\s*<div class="charts ">\s*<figure><figcaption>{title}'
    legend = re.search(block, html, re.S)
    assert [unescape(name) for name in re.findall("<span>(.*?)</span>", legend[1])] == sorted(SITES)
    for i, site in enumerate(sorted(SITES)):
        assert f"{site}, at least 50 % certain: {28 - i} of 32 right" in unescape(html)


def test_a_run_that_did_not_start_has_a_page_that_says_why(tmp_path):
    RunRecord(tmp_path).write(End(seconds=2.0, status="failed", reason="0 site(s) took part, min_sites is 1"))
    _, _, said = page_of(tmp_path)
    assert "A run that did not start" in said and "min_sites is 1" in said


def rows_of(folder):
    """The rows of each section's tables, by its anchor."""
    return {
        section.get("id"): [[" ".join("".join(cell.itertext()).split()) for cell in row] for row in section.iter("tr")]
        for section in page_of(folder)[1].iter("section")
    }


def test_an_alarm_has_its_limit_for_each_part_of_the_model_and_findings_under_the_minimum_raise_none(tmp_path):
    write_run(tmp_path, sites=[NORTH], rounds=1)
    natural = {"n": 20, "identical_share": 0.1, "mismatched_share": 0.1, "length_ratio": 1.0}

    def rows(n, recall, precision, **scores):
        nodule = {"n": n, "named": n, "recall": recall, "precision": precision}
        alone = {"all": natural, "references": {"identical_share": 0.1}}
        before = alone | {"findings": {"known": {"nodule": nodule | {"recall": 0.9, "precision": 1}}}}
        after = alone | {"findings": {"known": {"nodule": nodule}}, "all": natural | scores}
        edit(tmp_path, "evaluation", at=0, sites={NORTH: before})
        edit(tmp_path, "evaluation", at=1, sites={NORTH: after}, generic={NORTH: alone})
        return rows_of(tmp_path)

    head, first, *others = rows(20, 0.8, 0.85, identical_share=0.6)["alarms"]
    assert head[2:4] == ["with the patient adapter", "shared adapter alone"]
    alarms = {row[0]: row[1:] for row in (first[1:], *others)}
    assert alarms["identical reports"][:3] == ["raised: 60 %", "10 %", "above 35 %"]
    assert alarms["finding recall"][:3:2] == ["raised: 80 %", "below 88 %"]
    assert alarms["invented findings"][:3:2] == ["raised: 15 %", "above 2 %"]
    few = rows(4, 0.1, 0.85)
    assert "findings" not in few and not {"finding recall", "invented findings"} & {row[0] for row in few["alarms"]}


def test_precision_and_recall_of_each_finding_by_site(tmp_path):
    said = rows_of(write_run(tmp_path, content=True, generic=True))
    head, _, *rows = said["findings"]
    assert head[1:] == sorted((EAST, NORTH, SOUTH))
    emphysema, fibrosis = (next(row for row in rows if row[0] == name) for name in ("emphysema", "fibrosis"))
    assert emphysema[1] == "6" and emphysema[4:6] == ["7", "95"]
    assert fibrosis[1] == "5" and fibrosis[4:] == [""] * 15  # 4 and 3 reports are under the minimum


def test_cells_under_min_cell_and_the_cider_of_one_report_are_blank(tmp_path):
    run = read_run(write_run(tmp_path, min_cell=5))
    assert run.shown.sites[SOUTH].steps[3] == {"n": 3}
    one = SiteScores(steps={1: {"n": 1, "bleu_4": 0.5, "cider": 0.0, "token_loss": None}}, all={"n": 9, "cider": 1.0})
    RunRecord(tmp_path).write(Evaluation(round=4, sites={NORTH: one}, generic={NORTH: one}))
    final = read_run(tmp_path).shown
    assert final.sites[NORTH].steps[1] == final.generic[NORTH].steps[1] == {"n": 1}
    edit(tmp_path, "start", min_cell=1)
    final = read_run(tmp_path).shown
    for sites in (final.sites, final.generic):
        assert sites[NORTH].steps[1] == {"n": 1, "bleu_4": 0.5} and sites[NORTH].all == {"n": 9, "cider": 1.0}


def test_a_resumed_record_goes_on_and_a_repeated_event_counts_once(tmp_path):
    write_run(tmp_path, rounds=2, until="rounds")
    before = read_run(tmp_path).validations[1].loss
    write_run(tmp_path, rounds=4, first_round=2)
    run = read_run(tmp_path)
    every = [(r, t) for r in range(1, 5) for t in range(1, 4)]
    assert [(s.round, s.step) for s in run.steps] == [(s.round, s.step) for s in run.events(Residual)] == every
    assert [o.round for o in run.events(Outer)] == [1, 2, 3, 4] and run.validations[1].loss != before
    assert (run.start.first_round, run.start.rounds, run.status) == (1, 4, "completed")
    RunRecord(tmp_path).write(Late(site=NORTH, task="train"))
    assert read_run(tmp_path).status == "completed", "a late answer does not reopen a run, a start does"
    write_run(tmp_path, rounds=5, first_round=5, until="start")
    assert read_run(tmp_path).status == "unfinished"


def test_of_an_unknown_method_the_shared_events_are_read_and_shown(tmp_path):
    edit(write_run(tmp_path), "start", method="fedfuture")
    run = read_run(tmp_path)
    assert run.title == "fedfuture" and run.method_events == () and len(run.steps) == 9
    assert 'id="scores"' in page(run) and "alpha after" not in page(run)


UNKNOWN = st.text(min_size=1).map(lambda name: f"x-{name}")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)
@given(st.dictionaries(UNKNOWN, st.none() | st.integers() | st.text()), UNKNOWN)
def test_unknown_events_and_unknown_fields_are_passed_over(tmp_path, more, kind):
    folder = tmp_path / "run"
    (folder / "rounds.jsonl").unlink(missing_ok=True)
    write_run(folder, rounds=1)
    before = page(read_run(folder))
    path = folder / "rounds.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({"event": kind} | more)]
    for event in events:
        sites = {site: values | more for site, values in event["sites"].items()} if event["event"] == "step" else None
        lines += [json.dumps(event | more | ({"sites": sites} if sites else {})), json.dumps({"event": kind} | more)]
    path.write_text("\n".join(lines[:-1]) + "\n")
    assert page(read_run(folder)) == before


START = Start(method="fedtar", run_id="r", time_steps=3, rounds=3).model_dump() | {"event": "start"}
BROKEN = {
    b"": "",
    b'{"event": "greeting"}\n': "",
    b'{"epoch": 1}\n': "line 1",
    b"3\n4\n": "line 1",
    b'{"event": "step", "round": 1, "step": 1}\n': "'start'",
    b'{"event": "start"}\n': "line 1, event 'start': method",
    json.dumps(START | {"time_steps": 2.5}).encode(): "line 1, event 'start': time_steps",
    json.dumps(START | {"counts": {"a": 4}}).encode(): r"event 'start': counts\.a",
    b"\xff\xfe\x00": "",
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_record_is_refused_and_the_error_names_the_line_and_the_field(tmp_path, content):
    (tmp_path / "rounds.jsonl").write_bytes(content)
    with pytest.raises(FedTARError, match=BROKEN[content] or None):
        read_run(tmp_path)
