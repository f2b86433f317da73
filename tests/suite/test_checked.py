"""A labeler against staff: F1 corrected by a sample that they labelled, and the way there by ``fedtar score``."""

import csv
import json
from functools import partial

import numpy as np
import pytest
from command import failing, passing
from sklearn.metrics import f1_score
from tables import write_table

from fedtar_flare.learning.evaluation import write_report_scores
from fedtar_flare.metrics import label_noise
from fedtar_flare.metrics.agreement import LabelCounts
from fedtar_flare.metrics.labeler import rule_labeler
from fedtar_flare.metrics.significance import over_seeds

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


TEXTS = [
    ("Small left effusion.", "Left effusion."),
    ("Lungs are clear.", "Right effusion and edema."),
    ("Cardiomegaly. Mild edema.", "Cardiomegaly."),
    ("Blunted angle.", "Small effusion."),  # the rules miss what staff see in the first
]
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
