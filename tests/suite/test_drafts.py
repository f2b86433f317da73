"""Drafts of any system scored from files, a run's pairs written for other tools, and labels checked by staff."""

import csv
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command import console_commands, failing, passing
from made_up_results import keep
from sklearn.metrics import f1_score
from tables import cases, write_table

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.evaluation import report_rows, write_report_scores
from fedtar_flare.metrics import label_noise
from fedtar_flare.metrics.agreement import LabelCounts
from fedtar_flare.metrics.classification import auc, lca
from fedtar_flare.metrics.labeler import rule_labeler
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.metrics.significance import Interval, compare, holm, mean_score, over_seeds
from fedtar_flare.metrics.text_sums import reports_of_texts, text_sums
from fedtar_flare.reporting.format import score
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.plan import experiments
from fedtar_flare.suite.results import SUMS, by_arm, compare_scores, difference, read_results
from fedtar_flare.suite.tables import verdict, winner
from fedtar_flare.suite.task_page import Run, differences, task_page, values

ROWS, TEXTS = cases(__file__, "drafts.yaml").values()
REPORTS = [{"study_id": s, "patient_id": p, "report": report} for s, p, report, _ in ROWS]
DRAFTS = [{"study_id": s, "prediction": draft} for s, _, _, draft in ROWS]
FORMS = {
    ".csv": lambda rows: "\n".join([",".join(rows[0]), *(",".join(f'"{v}"' for v in row.values()) for row in rows)]),
    "-excel.csv": lambda rows: "\ufeff" + FORMS[".csv"](rows).replace(",", ";"),
    ".jsonl": lambda rows: "\n".join(map(json.dumps, reversed(rows))),
    ".json": json.dumps,
    "-rexrank.json": lambda rows: json.dumps({row["study_id"]: row for row in rows}),
}


def written(file, rows, form=".csv"):
    file = file.with_name(f"{file.name}{form}")
    file.write_text(FORMS[form](rows) + "\n")
    return file


@pytest.fixture
def reports(tmp_path):
    return written(tmp_path / "reports", REPORTS)


def test_sums_over_patients_give_every_score_that_needs_no_model():
    _, patients, *sides = zip(*ROWS, strict=True)
    of_texts = reports_of_texts(patients, *sides, "chexpert-rules")
    expected = scores_of(of_texts)
    assert expected.keys() - text_sums(of_texts).keys() == {"token_loss", "mismatched_share"}
    found = {name: sums.value() for name, sums in text_sums(of_texts).items()}
    assert found == pytest.approx({n: float("nan") if expected[n] is None else expected[n] for n in found}, nan_ok=True)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_file_gives_the_same_scores(tmp_path, reports, form):
    files = [written(tmp_path / "drafts", DRAFTS, of) for of in (".csv", form)]
    first, second = (json.loads(passing("score", "--drafts", f, "--reports", reports, "--json")) for f in files)
    assert [*first["values"].values()] == [*second["values"].values()] and first["patients"] == 4
    low, high = first["values"][str(files[0])]["rouge_l"][1:]
    assert low < first["values"][str(files[0])]["rouge_l"][0] < high


def test_two_files_are_compared_and_equal_ones_do_not_differ(tmp_path, reports):
    files = [written(tmp_path / f"{name}", DRAFTS) for name in ("one", "same")]
    worse = [row | {"prediction": "Port."} for row in DRAFTS]
    for other, won in ((files[1], {0.5}), (written(tmp_path / "worse", worse), {1.0, 0.5, 0.875})):
        page = tmp_path / "page.html"
        out = passing("score", "--drafts", files[0], other, "--reports", reports, "--json", "-o", page)
        tests = json.loads(out)["tests"]
        assert {test["win_rate"] for test in tests if test["score"] in ("rouge_l", "bleu_1")} <= won
        assert (other != files[1]) or {test["p"] for test in tests} == {1.0}
        assert page.read_text().count("<table") == 2 and page.stat().st_mode & 0o077 == 0
        assert f"{files[0]} minus {other}; won: by the first" in page.read_text()


WRONG = {
    "no draft of study 's1'": DRAFTS[1:],
    "no report of study 'x'": [*DRAFTS, DRAFTS[0] | {"study_id": "x"}],
    "'s3' is there twice": [*DRAFTS, DRAFTS[2]],
    "draft or report); there is: study_id, words": [{"study_id": "s1", "words": "Clear."}],
}


def test_a_study_that_is_missing_double_or_nameless_and_a_file_of_no_texts_are_errors_by_name(tmp_path, reports):
    for named, drafts in WRONG.items():
        file = written(tmp_path / "drafts", drafts)
        error = failing("score", "--drafts", file, "--reports", reports)
        assert named in error and file.name in error
    for text in ("{", "[1]", "[]", '{"s1": "a", "s1": "b"}', r'{"s1": "half a \ud800"}'):
        (file := tmp_path / "drafts.json").write_text(text)
        assert "drafts.json" in failing("score", "--drafts", file, "--reports", reports)


def test_pairs_are_exported_under_keyed_ids_and_scored_again(tmp_path, cohort):
    samples = cohort.samples("test")
    rows = report_rows(samples, [sample.visit.report for sample in samples], [1.0] * len(samples), personal=True)
    write_report_scores(state := tmp_path / "state", 1, rows)
    files = [tmp_path / name for name in ("a.csv", "b.json", "c.csv")]
    for file in files:
        passing("score", state, "--export", file)
    assert files[0].read_text() == files[2].read_text(), "ids are the same in every export"
    ids = {row[column] for row in rows for column in ("patient_id", "visit_id")}
    assert not [name for name in ids for file in files if re.search(rf"\b{name}\b", file.read_text())]
    lists, table = json.loads(files[1].read_text()), [*csv.DictReader(files[0].open())]
    assert lists["refs"] == [row["report"] for row in table] == [sample.visit.report for sample in samples]
    assert lists["hyps"] == [row["prediction"] for row in table] and lists["study_ids"][0] == table[0]["study_id"]
    scores = json.loads(passing("score", "--drafts", files[0], "--reports", files[0], "--json"))
    assert scores["patients"] == len({sample.visit.patient_id for sample in samples})
    passing("score", state, "--export", files[0], "--visit-ids")
    assert rows[0]["visit_id"] in files[0].read_text()
    failing("score", state, "--export", tmp_path / "pairs.txt")
    assert "clinical_score" in {one.score for one in compare_scores("x", [(rows, rows)], "patients")}
    other = write_report_scores(tmp_path / "other", 1, rows[1:]).parent
    assert "no draft of study" in failing("score", state, "--labeler", "ctrate-rules", "--against", other)


def test_the_page_leads_from_two_tables_to_a_page_with_intervals(repository, tmp_path):
    page = repository / "docs/how-to/score-drafts.md"
    tables = dict(re.findall(r"^`(\w+\.csv)`:\n\n```csv\n(.*?)^```", page.read_text(), flags=re.M | re.S))
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    printed = [passing(*command.split()[1:], cwd=tmp_path) for command in console_commands(page)]
    assert (len(tables), len(printed)) == (3, 2)
    assert " to " in printed[0] and (tmp_path / "page.html").read_text().count("<table") == 2


def study_rows(draw, good):
    """60 studies of 12 patients, with labels of CheXbert."""
    words = {"matches": [5, 4, 3, 2], "guesses": [8, 7, 6, 5], "hypothesis_length": 8, "reference_length": 8}
    rows = []
    for i in range(60):
        truth = draw.choice(list("bpnu"), 14)
        named = np.where(draw.random(14) < good, truth, draw.choice(list("bpnu"), 14))
        who = {"site": "a", "patient_id": f"p{i % 12}", "visit_id": f"v{i}", "findings": None, "changes": None}
        scores = {"cider": good + (i % 12) / 3 + draw.normal() / 9, "rouge_l": 0.5}
        scores |= {"token_loss": 3 - good * draw.random()}
        rows.append(who | words | scores | {"labels": {"chexbert": ["".join(truth), "".join(named)]}})
    return rows


def test_every_metric_over_studies_draws_studies_and_corrects_for_the_metrics():
    a, b = study_rows(np.random.default_rng(1), 0.6), study_rows(np.random.default_rng(1), 0.5)
    for one, other in zip(a, b, strict=True):
        one["cider"] += 0.3 * float(np.random.default_rng(len(one["visit_id"])).normal() > 0) - other["cider"] % 0.1
    found = {one.score: one for one in compare_scores("x", [(a, b)], "studies")}
    assert set(found) == {name for name in SUMS if name.startswith(("bleu", "rouge", "cider", "token", "chexbert_"))}
    cider, studies = difference("x", "cider", [(a, b)], "studies"), [f"{i:02d}" for i in range(60)]
    order = sorted(range(60), key=lambda i: (a[i]["patient_id"], a[i]["visit_id"]))
    apart = [mean_score(studies, [rows[i]["cider"] for i in order]) for rows in (a, b)]
    assert cider[2:] == compare(apart[:1], apart[1:])
    assert found["token_loss"].difference.value < 0 and found["token_loss"][-2:] == (1, 1), "lower is better"
    alone = {name: difference("x", name, [(a, b)], "studies").p for name in found}
    assert {name: one.p for name, one in found.items()} == pytest.approx(holm(alone))
    whole = difference("x", "cider", [(a, b)], "patients").difference
    assert whole.value == pytest.approx(cider.difference.value) and whole[1:] != cider.difference[1:]


def test_nobody_is_best_on_a_tie_and_a_difference_is_beyond_chance_where_its_interval_and_its_p_say_so():
    shown = partial(score, "bleu_4")

    def said(means, **less):
        return verdict("BLEU-4", means, None, less, "b", {"a": "A", "b": "B"}, shown)

    for means, best in (({"a": 0.001, "b": 0.0006}, None), ({"a": 0.001, "b": 0.0002}, "a")):
        assert winner(means, shown) == best and ("A has the best" in said(means)) == (best is not None)
    assert winner({"a": 0.5}, shown) is None and said({"a": 0.5}) == "A is the only arm with results: BLEU-4."
    for low, p, beyond in ((0.01, 0.01, 1), (0.01, 0.2, 0), (-0.01, 0.01, 0), (0.01, None, 1), (np.nan, None, 0)):
        assert said({"a": 0.5, "b": 0.4}, a=(Interval(0.1, low, 0.2), p)).endswith(": beyond chance.") == beyond, low


TASKS = cases(__file__, "tasks.yaml")
SITES, TASK_ARMS = TASKS["sites"], TASKS["arms"]
EPOCHS = 2


def made(folder: Path, better=0.0, shuffled_too=False, one_class=(), **changes):
    """A suite whose results nobody ran: FedKEI's scores of positives are higher by ``better``."""
    arms = TASK_ARMS | ({"other": {"method": "fedkei", "label": "other order"}} if shuffled_too else {})
    suite = Suite(**{**TASKS, "arms": arms, **changes})
    planned = experiments(suite)
    for one in planned:
        draw = np.random.default_rng(one.seed)  # the same images and noise for all arms
        rows, tasks = [], []
        for step, task in enumerate(("effusion", "nodule"), start=1):
            for site in SITES:
                about = {"step": step, "site": site, "task": task}
                tasks.append(about | {"seconds": [0.5 * step, 2.0, 3.0], "start_seconds": 0.5, "membership": 0.6})
                for i in range(12):
                    scores = draw.random(EPOCHS + 1) + (better if one.name == "fedkei" and i % 2 else 0.0)
                    name = f"{'o' if one.name == 'other' else 'p'}-{i // 2}"
                    label = 0 if task in one_class else i % 2
                    rows.append({**about, "patient_id": name, "label": label, "scores": scores.tolist()})
        known = {"label": one.arm.label, "versions": {"torch": "2"}, "bytes": 1000, "seconds": 9.0, "tasks": tasks}
        keep(folder, one, known, rows)
    return suite, planned


def runs_by_arm(results):
    return {name: [Run(one) for one in several] for name, several in by_arm(results).items()}


def test_what_only_reports_answer_is_refused_and_so_are_both_kinds_in_one_table():
    for change in ({"outside": ["site-3"]}, {"arms": {**TASK_ARMS, "fedavg": {"method": "fedavg"}}, "settings": {}}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            experiments(Suite(**{**TASKS, **change}))


def test_scores_are_means_over_sites_of_the_tasks_after_the_first(tmp_path):
    _, planned = made(tmp_path)
    for one in read_results(tmp_path, planned):
        run = Run(one)
        wanted = []
        for site in SITES:
            rows = [row for row in one.rows if (row["site"], row["step"]) == (site, 2)]
            columns = np.array([row["scores"] for row in rows]).T
            wanted.append([auc([row["label"] for row in rows], column) for column in columns])
        means = [(curve[0], curve[-1], lca(curve), np.mean(curve)) for curve in wanted]
        assert run.scores()[:, 0] == pytest.approx(np.mean(means, axis=0))
    suite, planned = made(tmp_path / "one", one_class=("effusion", "nodule"))
    assert "No method has an LCA: no hospital" in task_page(suite, read_results(tmp_path / "one", planned))


def test_equal_arms_differ_by_nothing_and_a_better_one_by_more(tmp_path):
    _, planned = made(tmp_path, shuffled_too=True)
    found = differences(runs_by_arm(read_results(tmp_path, planned)), "rand")
    assert set(found) == {"fedkei"}, "an arm that met other images is not paired"
    assert all(one.value == (0, 0, 0) and one.p == 1 for one in found["fedkei"].values())
    _, planned = made(tmp_path / "better", better=0.6)
    arms = runs_by_arm(read_results(tmp_path / "better", planned))
    more = differences(arms, "rand")["fedkei"]["lca"]
    assert more.value.low > 0 and more.value.low < more.value.value < more.value.high and 0 < more.p < 1
    own = values(arms["rand"])["final"].value
    assert own.low < own.value < own.high
    assert values(arms["rand"][:1] * 3)["final"] == values(arms["rand"][:1])["final"], "the same patients are drawn"
    epochs, seconds = zip(*(reached for run in arms["fedkei"] for reached in run.reached(arms["rand"][0])), strict=True)
    assert set(epochs) <= {0, 1, 2} and set(seconds) <= {1.0, 2.0, 3.0}


PREVALENCE, NAMED, INVENTED = np.array([0.1, 0.25, 0.4]), 0.75, 0.08  # of what is there, drafts name 75 %
F1 = 2 * NAMED * PREVALENCE.sum() / (PREVALENCE + NAMED * PREVALENCE + INVENTED * (1 - PREVALENCE)).sum()


def noisy(draw, found, invented, alike, patients=80, cases=60):
    """A labeler that finds a share of what a text states, and errs alike in a share of drafts and references."""
    there = draw.random((2 * patients, 3)) < PREVALENCE
    truth = np.stack([there, draw.random(there.shape) < np.where(there, NAMED, INVENTED)], axis=1)
    luck = draw.random(truth.shape)
    luck[:, 1] = np.where(draw.random(there.shape) < alike, luck[:, 0], luck[:, 1])
    labels = np.where(truth, luck < found, luck > 1 - invented).astype(float)
    checked = np.where(draw.permutation(2 * patients)[:, None, None] < cases, truth, np.nan)
    counts = LabelCounts(("a", "b", "c"), labels.prod(axis=1), labels[:, 1], labels[:, 0])
    return label_noise.label_noise(np.arange(2 * patients) // 2, counts, checked)["micro"]


@pytest.mark.parametrize("alike", [0.0, 0.6])
def test_the_corrected_interval_covers_the_true_f1_and_the_labels_own_does_not(monkeypatch, alike):
    monkeypatch.setattr(label_noise, "over_seeds", partial(over_seeds, replicates=200))
    draw = np.random.default_rng(7)
    trials = [noisy(draw, found=0.8, invented=0.05, alike=alike) for _ in range(200)]
    covered = {
        name: np.mean([getattr(one, name).low <= F1 <= getattr(one, name).high for one in trials])
        for name in ("corrected", "labelled")
    }
    assert covered["corrected"] >= 0.9 and covered["labelled"] < 0.6, covered
    assert np.mean([one.corrected.value for one in trials]) == pytest.approx(F1, abs=0.01)
    assert np.mean([one.recall.low <= 0.8 <= one.recall.high for one in trials]) >= 0.9


CASES = [(f"patient-{i // 2}", f"study-{i}", *TEXTS[i % 4]) for i in range(24)]
CLASSES = rule_labeler("chexpert-rules").names


def staff(text):
    """What the rules say, and an effusion behind a blunted angle."""
    labels = rule_labeler("chexpert-rules")(text)
    if text == "Blunted angle.":
        labels["Pleural Effusion"] = "positive"
    return [int(labels[name] == "positive") for name in CLASSES]


@pytest.fixture(params=["files", "state"])
def scored(request, tmp_path):
    """Arguments that name drafts with their reports, as two files and as a run's state."""
    names = ("patient_id", "study_id", "report", "prediction")
    if request.param == "files":
        pairs = write_table(tmp_path / "pairs.csv", [dict(zip(names, case, strict=True)) for case in CASES])
        return ["--drafts", pairs, "--reports", pairs]
    names = ("patient_id", "visit_id", "reference", "text")
    rows = [dict(zip(names, case, strict=True)) | {"personal": True} for case in CASES]
    return [write_report_scores(tmp_path / "s", 1, rows).parent, "--labeler", "chexpert-rules"]


def filled(file, labels=staff, keep=lambda number: True):
    """Write staff's labels into a sample; in a row without one, that means not checked."""
    rows = [*csv.DictReader(file.open())]
    for number, row in enumerate(rows):
        row.update(zip(CLASSES, labels(row["report"]) if keep(number) else [""] * len(CLASSES), strict=True))
    write_table(file, rows)
    return rows


def test_where_all_is_checked_corrected_f1_is_staff_s(scored, tmp_path):
    file = tmp_path / "check.csv"
    passing("score", *scored, "--check-sample", file)
    assert file.stat().st_mode & 0o077 == 0 and "patient-" not in file.read_text() and "study-" not in file.read_text()
    rows = filled(file)
    assert len({row["id"] for row in rows}) == 48
    found = json.loads(passing("score", *scored, "--checked", file, "--json"))["label_noise"]
    truth = [np.array([staff(case[side]) for case in CASES]) for side in (2, 3)]
    assert found["micro"]["corrected"][0] == pytest.approx(f1_score(*truth, average="micro"))
    assert found["micro"]["corrected"][0] > found["micro"]["labelled"][0] and found["micro"]["checked"] == 24
    effusions = sum(int(side[:, CLASSES.index("Pleural Effusion")].sum()) for side in truth)
    assert found["Pleural Effusion"]["recall"][0] == pytest.approx((effusions - 6) / effusions)
    value, low, high = found["Pleural Effusion"]["precision"]
    assert value == high == 1 and low < 0.95, "none of few is wrong: that does not make it sure"
    assert "F1, corrected" in passing("score", *scored, "--checked", file)


def test_what_is_no_sample_of_these_texts_is_refused(scored, tmp_path):
    assert "at least 10" in failing("score", *scored, "--check-sample", tmp_path / "few.csv", "--cases", 9)
    file = tmp_path / "check.csv"
    passing("score", *scored, "--check-sample", file, "--cases", 12)
    assert "there already" in failing("score", *scored, "--check-sample", file)
    assert "0 cases are checked" in failing("score", *scored, "--checked", file)
    filled(file, keep=lambda number: number % 3)
    assert "cases are checked, 10 are needed" in failing("score", *scored, "--checked", file)
    filled(file, labels=lambda text: ["yes"] * len(CLASSES))
    assert "not 'yes'" in failing("score", *scored, "--checked", file)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "0123456789abcdef" + lines[1][16:]]))
    assert "no report or draft has the id" in failing("score", *scored, "--checked", file)
    file.unlink()
    passing("score", *scored, "--check-sample", file, "--cases", 12)
    filled(file)
    lines = [line.replace(",", ";") for line in file.read_text().splitlines()]  # as a spreadsheet may save it
    file.write_text("\ufeff" + "\r\n".join([*lines, lines[1]]))
    assert "labelled twice" in failing("score", *scored, "--checked", file)
