"""Drafts of any system scored from files, and a run's pairs written for other tools."""

import csv
import json
import re

import pytest
from command import console_commands, failing, passing

from fedtar_flare.learning.evaluation import report_rows, write_report_scores
from fedtar_flare.metrics.registry import scores_of
from fedtar_flare.metrics.text_sums import reports_of_texts, text_sums

ROWS = [
    ("s1", "p1", "Small left effusion. No pneumothorax.", "Small left effusion."),
    ("s2", "p1", "The left effusion has increased.", "Unchanged left effusion."),
    ("s3", "p2", "Lungs are clear.", "Lungs are clear."),
    ("s4", "p3", "Moderate cardiomegaly with mild edema.", "Cardiomegaly. No edema."),
    ("s5", "p4", "Kein Pneumothorax.", "Pneumothorax."),
]
REPORTS = [{"study_id": s, "patient_id": p, "report": report} for s, p, report, _ in ROWS]
DRAFTS = [{"study_id": s, "prediction": draft} for s, _, _, draft in ROWS]
FORMS = {
    ".csv": lambda rows: "\n".join([",".join(rows[0]), *(",".join(f'"{v}"' for v in row.values()) for row in rows)]),
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


WRONG = {
    "no draft of study 's1'": DRAFTS[1:],
    "no report of study 'x'": [*DRAFTS, DRAFTS[0] | {"study_id": "x"}],
    "'s3' is there twice": [*DRAFTS, DRAFTS[2]],
    "draft 1 must have a study": [{"study_id": "s1", "words": "Clear."}],
}


def test_a_study_that_is_missing_double_or_nameless_and_a_file_of_no_texts_are_errors_by_name(tmp_path, reports):
    for named, drafts in WRONG.items():
        file = written(tmp_path / "drafts", drafts)
        error = failing("score", "--drafts", file, "--reports", reports)
        assert named in error and file.name in error
    for text in ("{", "[1]", "[]", '{"s1": "a", "s1": "b"}'):
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


def test_the_page_leads_from_two_tables_to_a_page_with_intervals(repository, tmp_path):
    page = repository / "docs/how-to/score-drafts.md"
    tables = dict(re.findall(r"^`(\w+\.csv)`:\n\n```csv\n(.*?)^```", page.read_text(), flags=re.M | re.S))
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    printed = [passing(*command.split()[1:], cwd=tmp_path) for command in console_commands(page)]
    assert (len(tables), len(printed)) == (3, 2)
    assert " to " in printed[0] and (tmp_path / "page.html").read_text().count("<table") == 2
