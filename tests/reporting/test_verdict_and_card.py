"""The verdict, the closing box and the model card of a run, and which scores of a site raise which alarm."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import RUN_ID, SITES, SOUTH, edit, write_run
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.record.events import End, Evaluation, SiteScores, SiteValidation, Start, Validation
from fedtar_flare.reporting.alarms import alarms
from fedtar_flare.reporting.control import keep_control
from fedtar_flare.reporting.model_card import base_model, model_card, write_model_card
from fedtar_flare.reporting.page import page
from fedtar_flare.reporting.run import Run, read_run
from fedtar_flare.reporting.scores import overall
from fedtar_flare.reporting.verdict import RULE, UNKNOWN, closing_box, verdict


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


def test_the_closing_box():
    before, after = {"bleu_4": 0.095, "finding_f1_known": 0.9}, {"bleu_4": 0.725, "finding_f1_known": 0.8}
    box = closing_box(run_of(before, {1: after | {"token_loss": 0.5}}), {"report": "/x/report.html"}).splitlines()
    assert box[0] == box[-1] == RULE and box[1] == "run r: completed in 1 min 15 s, warm start -> round 1"
    assert [re.split(" {2,}", line) for line in box[2:-1]] == [
        ["known findings F1, x 100", "90.0 -> 80.0", "worse"], ["BLEU-4, x 100", "9.5 -> 72.5", "better"],
        ["Test reports", "80", "mean of 2 sites"], [f"each hospital alone: {UNKNOWN}"], ["report", "/x/report.html"],
    ]  # fmt: skip


def test_degree_and_change_come_first_in_box_and_verdict_better_or_worse():
    before = {"bleu_4": 0.1, "degree_accuracy": 0.47, "change_accuracy": 0.1, "contradictions": 0.2}
    after = {"bleu_4": 0.8, "degree_accuracy": 0.34, "change_accuracy": 0.6, "contradictions": 0.58}
    run = run_of(before, {1: after | {"finding_change_micro_f1": 0.185}})
    remarks = [re.split(" {2,}", line)[2:] for line in closing_box(run).splitlines()[2:7]]
    assert remarks == [["worse"], ["better"], [], ["worse"], ["better"]]
    text = verdict(run)[0]
    order = ["change right improved", "degree right fell", "contradictions between visits rose (worse)"]
    order += ["changes named F1 reached 18.5, not known before", "BLEU-4 improved"]
    assert sorted(order, key=text.index) == order and "by 50.0 points (10.0 → 60.0)" in text


def alone_in(folder, **changes):
    """A run of FedTAR and one in which the same hospitals, but for ``changes``, shared nothing; all are scored."""
    runs = [read_run(write_run(folder / name)) for name in ("joined", "alone")]
    edit(folder / "alone", "start", **{"method": "local_patient", "run_id": "by-itself"} | changes)
    return runs[0], read_run(folder / "alone")


def test_what_each_hospital_reaches_alone_stands_beside_a_run_of_the_same_job_alone(tmp_path):
    run, other = alone_in(tmp_path)
    assert UNKNOWN in closing_box(run) and "hospital alone" not in " ".join(verdict(run))
    keep_control(run, other)
    value = f"{100 * overall(other).after['bleu_4']:.1f}"
    lines = closing_box(run).splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("BLEU-4")] == [["alone", value]]
    assert "each hospital alone: run by-itself" in lines and f"BLEU-4 {value}" in verdict(run)[1]
    assert f"alone {value}" in page(run) and f"BLEU-4 {value}" in model_card(run)
    longer = replace(run, start=run.start.model_copy(update={"settings": {"num_rounds": 9}}))
    assert UNKNOWN in closing_box(longer), "another job"
    assert "hospital alone" not in closing_box(other), "nothing was shared"


@pytest.mark.parametrize("changes", [{"counts": {site: {"test": [9, 9, 9]} for site in SITES}}, {"method": "fedavg"}])
def test_another_run_is_no_control_of_a_run(tmp_path, changes):
    run, other = alone_in(tmp_path, **changes)
    with pytest.raises(ConfigError, match="local_patient"):
        keep_control(run, other)


@given(
    st.sampled_from(["bleu_4", "finding_f1_known", "contradictions"]),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.sampled_from([4, 19, 20, 300]),
)
def test_a_verdict_says_a_fall_as_plainly_as_a_gain_and_of_few_reports_no_decimals(name, before, after, n):
    said = verdict(run_of({name: before / 1000}, {1: {name: after / 1000}}, n=n, sites=("a",)))[0]
    first, last = (f"{value / 1000 * 100:.{int(n >= 20)}f}" for value in (before, after))
    verb = "stayed"
    if first != last:
        rises = float(last) > float(first)
        verb = "improved" if rises is SCORES[name].higher_is_better else "rose (worse)" if rises else "fell"
    assert f"{SCORES[name].label} {verb} " in said and f"{n} test reports" in said
    assert verb == "stayed" or f"({first} → {last})" in said
    assert n >= 20 or not re.search(r"\d\.\d", said)


def test_a_verdict_on_the_shared_adapter_and_on_what_is_not_known():
    known = {"bleu_4": 0.5}
    assert "shared adapter alone" in verdict(run_of(known, {1: known}, generic=known))[1]
    assert verdict(run_of({}, {}))[0].startswith("Nothing is known")
    assert verdict(run_of(known, {}))[0].startswith("Nothing is known of training")
    assert "the change is unknown" in verdict(run_of({}, {1: known}))[0]


def test_the_round_that_is_kept_is_the_one_shown_and_another_one_is_named():
    def rounds(*scored):
        return run_of({"bleu_4": 0.1}, {r: {"bleu_4": r / 5} for r in scored}, validation=(3.0, 1.0, 2.0))

    kept = rounds(1, 2, 3)
    assert kept.best_round == kept.shown.round == 2 and "to round 2, BLEU-4 improved by 30.0 points" in verdict(kept)[0]
    assert "-> round 2" in closing_box(kept) and not kept.checkpoint_note
    other = rounds(1, 3)
    said = "kept: round 2, the best by validation loss, not scored; shown: round 3"
    assert other.checkpoint_note == said and said in closing_box(other) and "to round 3" in verdict(other)[0]
    assert verdict(other)[-1] == f"{said.capitalize()}."


def test_names_do_not_break_the_box_and_a_resumed_run_names_its_start(tmp_path):
    box = closing_box(read_run(write_run(tmp_path, sites=["b\x1b[31m\nc"], rounds=5, first_round=3)))
    assert {c for c in box if not c.isprintable()} == {"\n"} and "round 2 -> round 5" in box
    assert len({line.index("->") for line in box.splitlines()[2:] if "->" in line}) == 1


def head_of(card):
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


def test_the_card_beside_the_adapter(tmp_path):
    run = read_run(write_run(tmp_path))
    (tmp_path / "adapter").mkdir()
    path = write_model_card(run, tmp_path / "adapter")
    assert path == tmp_path / "adapter" / "README.md" and [p.name for p in path.parent.iterdir()] == ["README.md"]
    card = path.read_text(encoding="utf-8")
    assert head_of(card)["library_name"] == "peft" and head_of(card)["license"] == "Apache-2.0"
    for words in (
        f"# Shared adapter of run {RUN_ID}\n\nFrom the warm start to round 3, known findings F1 improved by ",
        "(FedTAR). They are those of round 3 of 3, the best by validation loss",
        "Not for clinical use",
        "| licence of the base model | Apache-2.0 |",
        "| adapter | 71680 values in 96 tensors, 287 kB in float32 (the whole model: 28 × as much) |",
        "| hospital-north | train | 30 | 21 | 12 |",
        "| alpha\\_form | softmax |",
        "| torch | 2.15.0 |",
        "| alpha, steps 1 to T | 0.333 0.333 0.333 -\\> ",
    ):
        assert words in card, words
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


def test_scores_are_those_of_the_adapters_round(tmp_path):
    write_run(tmp_path)
    edit(tmp_path, "validation", at=2, sites={site: {"validation_loss": 0.01, "n": 9} for site in SITES})
    assert "warm start → round 2;" in model_card(read_run(tmp_path))


def test_base_model_and_licence_are_as_the_settings_state_them(tmp_path):
    write_run(tmp_path)
    for model, name, listed in (
        ({}, "not stated", None), ({"preset": "small"}, "fedtar_flare preset small", None),
        ({"preset": "r2gen", "encoder_name": "cvt", "decoder_name": "a: b #"}, "fedtar_flare preset r2gen, cvt, a: b #",
         ["cvt", "a: b #"]),
    ):  # fmt: skip
        edit(tmp_path, "start", model=model)
        card = model_card(run := read_run(tmp_path))
        assert base_model(run) == name and head_of(card).get("base_model") == listed
        assert "license" not in head_of(card) and "| licence of the base model | not stated |" in card


def test_names_from_outside_stay_in_their_cell_and_a_run_without_scores_has_a_card(tmp_path):
    card = model_card(read_run(write_run(tmp_path / "a", sites=["a|b", "<i>`c`</i>\n# d"])))
    assert "| a\\|b | train |" in card and "\\<i\\>\\`c\\`\\</i\\> \\# d" in card
    card = model_card(read_run(write_run(tmp_path / "b", until="start")))
    assert "there was no validation patient to choose by" in card and "The run has no evaluation." in card
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
