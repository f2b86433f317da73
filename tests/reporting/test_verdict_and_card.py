"""The verdict, the closing box and the model card of a run, and which scores of a site raise which alarm."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import RUN_ID, SITES, SOUTH, edit, write_run
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_json
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import End, Evaluation, SiteScores, SiteValidation, Start, Validation
from fedtar_flare.reporting import control
from fedtar_flare.reporting.alarms import alarms
from fedtar_flare.reporting.control import keep_control
from fedtar_flare.reporting.model_card import model_card, write_model_card
from fedtar_flare.reporting.page import page
from fedtar_flare.reporting.plots import SMALL, Chart, Series, sharing_y, ticks
from fedtar_flare.reporting.run import Run, read_run
from fedtar_flare.reporting.scores import overall
from fedtar_flare.reporting.verdict import MOST, TOO_FEW, UNKNOWN, closing_box, key_numbers, verdict
from fedtar_flare.suite.file import read_suite
from fedtar_flare.suite.plan import experiments
from fedtar_flare.suite.results import result_file
from tools.keep_control import keep


def run_of(before, after, *, generic=None, n=40, validation=(1.0,), sites=("a", "b")):
    """A run whose sites all have the same scores before, and after each round in ``after`` (by round)."""

    def scored(r, scores, alone):
        of, off = (dict.fromkeys(sites, SiteScores(all={"n": n, **(found or {})})) for found in (scores, alone))
        return Evaluation(round=r, sites=of, generic=off if alone else {})

    losses = [
        Validation(round=r, loss=x, sites={site: SiteValidation(validation_loss=x, n=9) for site in sites})
        for r, x in enumerate(validation, 1)
    ]
    start = Start(method="other", run_id="r", sites=list(sites), time_steps=2, rounds=len(losses))
    evaluations = [scored(0, before, generic)] if before else []
    evaluations += [scored(r, scores, generic) for r, scores in after.items()]
    end = End(seconds=75.2, status="completed")
    return Run(Path("nowhere"), start, (), tuple(losses), tuple(evaluations), end, (), "Other")


def alone_in(folder, **changes):
    """A run of FedTAR and one in which the same hospitals, but for ``changes``, shared nothing; all are scored."""
    runs = [read_run(write_run(folder / name)) for name in ("joined", "alone")]
    edit(folder / "alone", "start", **{"method": "local_patient", "run_id": "by-itself"} | changes)
    return runs[0], read_run(folder / "alone")


def test_what_each_hospital_reaches_alone_stands_beside_a_run_of_the_same_job_alone(tmp_path):
    run, other = alone_in(tmp_path)
    assert UNKNOWN in closing_box(run) and UNKNOWN in verdict(run)[1] and UNKNOWN in page(run)
    keep_control(run, other)
    value = f"{100 * overall(other).after['bleu_4']:.1f}"
    lines = closing_box(run).splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("BLEU-4")] == [["alone", value]]
    assert "each hospital alone: run by-itself" in lines and "(run by-itself)" in verdict(run)[1]
    assert f"alone {value}" in page(run) and f"alone {value}" in model_card(run)
    longer = replace(run, start=run.start.model_copy(update={"settings": {"num_rounds": 9}}))
    assert UNKNOWN in closing_box(longer), "another job"
    assert "hospital alone" not in closing_box(other), "nothing was shared"


@pytest.mark.parametrize("changes", [{"counts": {site: {"test": [9, 9, 9]} for site in SITES}}, {"method": "fedavg"}])
def test_another_run_is_no_control_of_a_run(tmp_path, changes):
    run, other = alone_in(tmp_path, **changes)
    with pytest.raises(ConfigError, match="local_patient"):
        keep_control(run, other)


def test_means_of_a_suite_over_hospitals_and_seeds_stand_beside_the_very_job(tmp_path, monkeypatch):
    sites, arms = ["site-1", "site-2"], {"alone": {"method": "local_patient"}, "fedtar": {"method": "fedtar"}}
    run = read_run(write_run(tmp_path / "run", sites=sites, content=True))
    suite = {"name": "made-up", "sites": sites, "seeds": [0, 1], "settings": {"preset": "tiny"}, "arms": arms}
    (file := tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    planned = [run for run in experiments(read_suite(file)) if run.name == "alone"]
    for done, values in zip(planned, [(0.2, 0.4), (0.5, 0.7)], strict=True):
        scores = [{"all": {"n": 40, "degree_accuracy": value}} for value in values]
        event = {"round": 3, "sites": dict(zip(sites, scores, strict=True)), "generic": {}}
        result = {"scored_round": 3, "evaluations": [event], "counts": run.start.counts, "shares": False}
        write_json(result_file(tmp_path / "out", done), result | {"label": "alone", "seed": done.seed})
    kept = keep(tmp_path / "run", tmp_path / "out", str(file), tmp_path / "control.json")
    monkeypatch.setattr(control, "SHIPPED", kept)
    box = closing_box(run).splitlines()
    assert "each hospital alone: kept from suite made-up, seed 0, 1" in box
    (line,) = (line for line in box if line.startswith("degree right"))
    assert line.endswith("alone 45.0")
    other = read_run(write_run(tmp_path / "other", sites=sites, content=True, rounds=2))
    assert UNKNOWN in closing_box(other)


NAMES, COUNTS = st.sampled_from(["bleu_4", "finding_f1_known", "contradictions"]), st.sampled_from([4, 19, 20, 300])


@given(NAMES, st.integers(0, 1000), st.integers(0, 1000), COUNTS)
def test_a_fall_is_said_as_plainly_as_a_gain_and_of_few_reports_no_decimals(name, before, after, n):
    run = run_of({name: before / 1000}, {1: {name: after / 1000}}, n=n, sites=("a",))
    (label, values, change, _), (_, reports, _, _) = key_numbers(run)
    first, last = (f"{value / 1000 * 100:.{int(n >= 20)}f}" for value in (before, after))
    said = "unchanged" if n >= 20 else ""
    if first != last and n >= 20:
        said = "better" if (float(last) > float(first)) is SCORES[name].higher_is_better else "worse"
    assert label.startswith(SCORES[name].label) and change == said and reports == f"{n}"
    assert values == f"{first} → {last}" or n < 20
    assert f"({n} test reports" in verdict(run)[0]
    assert (TOO_FEW in closing_box(run)) == any(TOO_FEW.capitalize() in line for line in verdict(run)) == (n < 20)


def test_degree_and_change_come_first_of_six_rows():
    before = {"bleu_4": 0.1, "degree_accuracy": 0.47, "contradictions": 0.2, "cider": 1.0, "presence_f1": 0.5}
    after = before | {"degree_accuracy": 0.34, "change_accuracy": 0.6, "contradictions": 0.58, "finding_f1_new": 0.1}
    run = run_of(before, {1: after})
    rows = [(name.split(",")[0][:-2], *rest) for name, *rest in key_numbers(run)]
    assert rows[0] == ("degree right", "47.0 → 34.0", "worse", "") and len(rows) > MOST
    assert rows[1] == ("change right", "– → 60.0", "", "") and rows[2][0] == "contradictions between visits"
    assert rows[3][0] == "presence F1", "the findings of real images, before the wording"
    table = ElementTree.fromstring(page(run)).find(".//div[@class='verdict']//table")
    assert len([*table.iter("tr")]) == MOST == 6


def test_the_round_that_is_kept_is_the_one_shown_and_another_one_is_named():
    def rounds(*scored):
        return run_of({"bleu_4": 0.1}, {r: {"bleu_4": r / 5} for r in scored}, validation=(3.0, 1.0, 2.0))

    kept = rounds(1, 2, 3)
    assert kept.best_round == kept.shown.round == 2 and "to round 2 (" in verdict(kept)[0]
    assert "-> round 2" in closing_box(kept) and not kept.checkpoint_note
    other = rounds(1, 3)
    said = "kept: round 2, the best by validation loss, not scored; shown: round 3"
    assert other.checkpoint_note == said and said in closing_box(other) and "to round 3" in verdict(other)[0]
    assert ["model-index" in head_of(model_card(run)) for run in (kept, other)] == [True, False]


def test_names_do_not_break_the_box_and_a_resumed_run_names_its_start(tmp_path):
    box = closing_box(run := read_run(write_run(tmp_path, sites=["b\x1b[31m\nc"], rounds=5, first_round=3)))
    assert "| round 2 → trained |" in model_card(run)
    assert {c for c in box if not c.isprintable()} == {"\n"} and "round 2 -> round 5" in box
    assert len({line.index("->") for line in box.splitlines()[2:] if "->" in line}) == 1


def test_a_site_without_test_patients_is_not_among_those_that_a_mean_is_of():
    run = run_of({"bleu_4": 0.1}, {1: {"bleu_4": 0.2}}, sites=("a", "b", "c"))
    for gone, said in (["c"], "mean of 2 sites"), (["b", "c"], "40 test reports, a)"):
        for event in run.evaluations:
            event.sites.update(dict.fromkeys(gone, SiteScores(all={"n": 0})))
        assert said in verdict(run)[0]
    del (late := run_of({"bleu_4": 0.1}, {1: {"bleu_4": 0.2}}, sites=("a", "b", "c"))).evaluations[0].sites["c"]
    assert "(80 test reports, mean of 2 sites)" in verdict(late)[0], "a site that came late has no start"


def head_of(card):
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


def test_the_card_beside_the_adapter_has_the_scores_of_its_round(tmp_path):
    edit(write_run(tmp_path), "validation", at=2, sites={site: {"validation_loss": 0.01, "n": 9} for site in SITES})
    run = read_run(tmp_path)
    (tmp_path / "adapter").mkdir()
    path = write_model_card(run, tmp_path / "adapter")
    assert path == tmp_path / "adapter" / "README.md" and [p.name for p in path.parent.iterdir()] == ["README.md"]
    card = path.read_text(encoding="utf-8")
    (result,) = head_of(card)["model-index"][0]["results"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values["bleu_4"] == round(100 * overall(run).after["bleu_4"], 1) and "n" not in values
    assert head_of(card)["library_name"] == "peft" and head_of(card)["license"] == "Apache-2.0"
    assert f"# Shared adapter of run {RUN_ID}" in card and "Not for clinical use" in card
    assert "warm start → round 2;" in card and "| hospital-north | train | 30 | 21 | 12 |" in card
    bleu = [f"{100 * run.shown.sites['hospital-north'].all[f'bleu_{n}']:.1f}" for n in (1, 2)]
    assert f"| hospital-north | all | 21 | 8.0 → {bleu[0]} | 8.0 → {bleu[1]}" in card


def test_small_cells_are_blank_and_cannot_be_worked_out_from_totals(tmp_path):
    card = model_card(read_run(write_run(tmp_path)))
    assert f"| {SOUTH} | test | 9 | 5 | \\< 5 |" in card
    assert f"| {SOUTH} | 3 | \\< 5 |  |  |" in card
    assert f"| {SOUTH} | all | 14 |" in card and "| mean of sites | all | 57 |" in card  # scores of 14 and 57 reports
    cells = {"steps": {"1": {"n": 9}, "2": {"n": 3}}, "all": {"n": 12, "bleu_4": 0.5}}
    edit(tmp_path, "evaluation", sites={"a": cells, "b": cells})
    card = model_card(read_run(tmp_path))
    assert "| a | all | over 9 |" in card and "| mean of sites | all | over 18 |" in card


def test_names_from_outside_stay_in_their_cell_and_a_run_without_scores_has_a_card(tmp_path):
    card = model_card(read_run(write_run(tmp_path / "a", sites=["a|b", "<i>`c`</i>\n# d"])))
    assert "| a\\|b | train |" in card and "\\<i\\>\\`c\\`\\</i\\> \\# d" in card
    run = write_run(tmp_path / "b", until="start")
    edit(run, "start", model={"preset": "small", "encoder_name": "microsoft/cvt-21", "decoder_name": "/models/gpt2"})
    card = model_card(read_run(run))
    assert head_of(card)["base_model"] == ["microsoft/cvt-21"] and "model-index" not in head_of(card)
    assert "license" not in head_of(card) and "| licence of the base model | not stated |" in card
    assert "nan" not in card.lower().split()


NATURAL = {"identical_share": 0.1, "mismatched_share": 0.1, "length_ratio": 1.0, "contradictions": 0.3}


def site(recall=None, precision=None, references=0.1, **scores):
    """A site's scores; recall and precision are of a finding that the warm start knows."""
    shares = {"n": 20, "recall": recall, "named": 20, "precision": precision}
    known = {"nodule": {name: value for name, value in shares.items() if value is not None}}
    of_references = {"identical_share": references, "contradictions": 0.25}
    return SiteScores(all=NATURAL | scores, references=of_references, findings={"known": known})


@pytest.mark.parametrize(("now", "start", "raised"), cases(__file__, "alarms.yaml"))
def test_what_raises_which_alarm(now, start, raised):
    of_site = alarms(site(**now), site(**start) if start else None)
    assert {name for name, alarm in of_site.items() if alarm.raised} == {*raised}


def test_without_its_numbers_an_alarm_is_left_out():
    unknown = SiteScores(all={"mismatched_share": None, "identical_share": 1.0})
    assert alarms(None, site()) == alarms(unknown, site()) == {}
    assert not {"finding_recall", "invented_findings"} & {*alarms(site(recall=0.5, precision=0.5), SiteScores())}


NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@given(NUMBERS, st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_are_few_even_and_inside(low, span, most):
    high = low + span
    values = ticks(low, high, most)
    assert len(values) <= most + 1
    margin = 1e-6 * span + 4 * math.ulp(abs(low) + span)  # the span may be near the resolution of the numbers
    assert all(low - margin <= value <= high + margin for value in values)
    gaps = [b - a for a, b in pairwise(values)]
    assert not gaps or max(gaps) == pytest.approx(min(gaps), rel=1e-3)


def chart(*points):
    series = Series("<site>", [(x, y, f"{x}: {y}") for x, y in points])
    return ElementTree.fromstring(Chart('A "title" & more', [series], x_label="round", y_label="loss").figure())


@given(st.lists(st.tuples(st.integers(0, 50), st.none() | NUMBERS), max_size=12))
def test_any_series_gives_well_formed_svg_inside_its_frame(points):
    figure = chart(*points)
    assert figure.find("figcaption").text == 'A "title" & more'
    if all(y is None for _, y in points):
        assert figure.find("p").text == "Nothing recorded yet."
        return
    marks = [e.get("transform") for e in figure.iter("path") if e.find("title") is not None]
    assert len(marks) == sum(y is not None for _, y in points)
    for mark in marks:
        x, y = map(float, re.match(r"translate\((\S+) (\S+)\)", mark).groups())
        assert 0 <= x <= 420 and 0 <= y <= 240
    assert "nan" not in ElementTree.tostring(figure, encoding="unicode").lower()


def test_charts_of_a_figure_have_one_scale_that_begins_at_zero():
    lines = [Series("a <b>", [(0, 1.0, "")]), Series("others", [(0, 2.0, "")], "faded")]
    charts = sharing_y([Chart(f"{k}", lines[k:], (), "x", "y", size=SMALL) for k in (0, 1)])
    assert len({chart.y_range for chart in charts}) == 1 and charts[0].y_range[0] == 0, "axes are not cut"
    assert sharing_y(charts, 0.5)[0].y_range[0] == 0.5 and sharing_y(charts, 1.5)[0].y_range[0] == 0
