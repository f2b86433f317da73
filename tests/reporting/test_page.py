import re
from html import unescape
from xml.etree import ElementTree

import pytest
from recorded_runs import EAST, NORTH, RUN_ID, SITES, SOUTH, edit, write_run

from fedtar_flare.methods.fedtar.events import Outer, Residual
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import End
from fedtar_flare.record.log import RunRecord
from fedtar_flare.reporting.format import score
from fedtar_flare.reporting.page import write_report
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
    html, tree, said = page_of(write_run(tmp_path, until=until, alpha_form=alpha_form, time_steps=4))
    assert [section.get("id") for section in tree.iter("section")] == SECTIONS
    assert RUN_ID in said and ("completed" if until == "end" else "unfinished") in said
    assert not re.search(r"\b(nan|inf|None)\b", said, re.IGNORECASE)
    assert not re.search(r"\b(nan|none|inf)\b", " ".join(re.findall(r'\b(?:d|x|y|transform)="([^"]*)"', html)))
    assert "neither over patients nor over studies: a test takes the scores of single reports" in said
    assert ("sum 1 (softmax)" if alpha_form == "softmax" else "between 0 and 1 (sigmoid)") in said


def test_what_came_of_the_run_stands_before_how_it_was_made(tmp_path):
    folder = write_run(tmp_path, content=True)
    edit(folder, "start", settings={"sites": {"training": {"local_steps": 48}}, "seed": 5})
    html, tree, _ = page_of(folder)
    assert [section.get("id") for section in tree.iter("section")] == ["alarms", "findings", *SECTIONS]
    assert html.index('class="verdict"') < html.index("<nav>") < html.index('id="alarms"')
    folded = next(one for one in tree.iter("section") if one.get("id") == "optimisation").find("details")
    assert [one.get("id") for one in folded.iter("section")] == TRAINING
    repeat = dict(row[:2] for row in rows_of(folder)["settings"])
    assert (repeat["training.local_steps"], repeat["training.lr"], repeat["seed"]) == ("48", "0.001", "5")


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
        for site, update in step.sites.items():
            assert f"{site}, round {step.round}, step {step.step}: {update.samples} visits" in tips
            assert f"{site}, round {step.round}, step {step.step}: {update.train_loss:.3f}" in tips
    for one in run.events(Residual):
        taken = f"round {one.round}, step {one.step}: {one.residual_norm:.3g}<"
        assert not one.residual_norm or f"alpha times the mean update, {taken}" in tips
    for validation, outer in zip(run.validations, run.events(Outer), strict=True):
        assert f"all reports, round {validation.round}: {validation.loss:.3f}<" in tips
        assert " ".join(f"{alpha:.3f}" for alpha in outer.alpha_after) in said
    for more in ("4 min 12 s", "287 kB", "7.94 MB", "28 ×", "min_cell", "2.15.0", "The shared adapter alone"):
        assert more in said


def test_who_was_missing_is_told_with_the_reason(tmp_path):
    _, _, said = page_of(write_run(tmp_path))
    assert f"– {EAST}, no update: no answer within 60 s (step 2 of round 1)" in said
    assert f"× {EAST}, update refused: tensor base_model.model.decoder.x.lora_A.weight holds" in said
    assert f"○ {SOUTH}, too few visits to train on: 0 training visit(s) at step 3 (step 3 of rounds 1 to 3)" in said
    assert "Skipped, as nobody sent an update: step 3 of round 2" in said
    assert "hospital-west is not in the run: no answer within 60 s" in said
    assert f"{EAST} was left out in round 2: it did not receive every step of this round" in said


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
    head, parts, *rows = said["findings"]
    assert head[1:] == sorted((EAST, NORTH, SOUTH)) and parts == ["n", "recall", "n", "precision"] * 3
    names = [row[0] for row in rows if row[0] not in ("finding", "n")]
    of_one = ["known to the warm start", "emphysema", "nodule left", "new to the warm start", "fibrosis"]
    assert names == of_one * 2  # with the patient adapter and without
    emphysema, fibrosis = (next(row for row in rows if row[0] == name) for name in ("emphysema", "fibrosis"))
    assert emphysema[1] == "6" and emphysema[4:6] == ["7", "95"]
    assert fibrosis[1] == "5" and fibrosis[4:] == [""] * 15  # 4 and 3 reports are under the minimum
