"""Degrees and changes that rules read in follow-up reports; no rule was chosen on the half that is held out."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from fedtar_flare.learning.comparison import CHANGES, stated_changes
from fedtar_flare.learning.labels import LEVELS, UNKNOWN, labeler

FOLLOW_UPS = yaml.safe_load(Path(__file__).with_name("follow_ups.yaml").read_text(encoding="utf-8"))
DEGREES, SIGNS = dict(zip("smlp", LEVELS[1:], strict=True)), dict(zip("n+-=r", CHANGES[1:6], strict=True))


def gold_of(marks, findings):
    """By finding its level, its change by the words, and by both reports; None for a part that is not counted."""
    gold = dict.fromkeys(findings.values(), ("absent", "", ""))
    for code, *mark in (part.split() for part in marks.split(", ") if part):
        text = mark[0] if mark else ""
        sign = next((SIGNS[letter] for letter in text if letter in SIGNS), "")
        open_, alone = "~" in text, "" if "(" in text else sign
        level = None if text == "~" else DEGREES.get(text[0], "absent")
        gold[findings[code]] = (level, None if open_ else alone, None if open_ else sign)
    return gold


def count(counts, part, read, true):
    """Count a part that was read as right, wrong or missed."""
    if read and read == true:
        counts[part, "right"] += 1
    elif read or true:
        counts[part, "wrong"] += bool(read)
        counts[part, "missed"] += bool(true)


def counts_of(rules, half):
    reader, counts = labeler(rules), Counter()
    for text, marks, *before in FOLLOW_UPS[rules][half]:
        gold, stated = gold_of(marks, FOLLOW_UPS[rules]["findings"]), reader.stated_levels
        both = [stated_changes(text, stated(text), stated(b), reader) for b in before]
        rows = {"words": stated_changes(text, stated(text), None, reader)} | ({"two reports": both[0]} if both else {})
        for i, name in enumerate(reader.findings):
            if name == reader.no_finding:
                continue
            level, *changes = gold[name]
            read = LEVELS[reader.levels(text)[i]]
            if level is not None:
                count(counts, "presence", read != "absent", level != "absent")
                if "absent" not in (read, level):
                    counts["degree", "right" if read == level else "wrong"] += 1
            for (part, row), true in zip(rows.items(), changes, strict=False):
                if true is not None:
                    count(counts, part, CHANGES[row[i]] if row[i] > 0 else "", true)
    return counts


@pytest.mark.parametrize("half", ["tuned", "held_out"])
@pytest.mark.parametrize("rules", ["chexpert-rules", "ctrate-rules"])
def test_what_a_reader_takes_from_follow_ups_is_read(rules, half):
    counts = counts_of(rules, half)
    for part, precise, complete in (("presence", 0.95, 0.95), ("words", 0.94, 0.75), ("two reports", 0.99, 0.99)):
        right, wrong, missed = (counts[part, kind] for kind in ("right", "wrong", "missed"))
        assert right >= precise * (right + wrong) and right >= complete * (right + missed), (part, counts)
    right, wrong = counts["degree", "right"], counts["degree", "wrong"]
    assert right > 20 and right >= 0.93 * (right + wrong), counts


@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ("No effusion.", "Small effusion.", "new"),
        ("Clear lungs.", "Small effusion.", "new"),  # a normal report denies what it does not name
        ("Clear lungs.", "Chest tube in place.", None),  # but for devices
        ("Worse in the lower lobes.", "Small effusion.", None),  # names no finding, and is not normal
        ("Small effusion.", "Radiological worsening.", None),
        ("Cardiomegaly.", "Small effusion.", None),
        ("Possible effusion.", "Small effusion.", None),
        ("Small effusion.", "Cardiomegaly.", None),
        ("Small effusion.", "Possible effusion.", None),
        ("Small effusion.", "No effusion.", "resolved"),
        ("Small effusion.", "Normal chest.", "resolved"),
        ("Small effusion.", "Effusion.", None),
        ("Small effusion.", "Large effusion.", "increased"),
        ("Small effusion.", "Large effusion, decreased.", "decreased"),  # words first
        ("No effusion.", "Clear lungs.", "none"),
    ],
)
def test_two_reports_tell_a_change_only_where_both_speak(before, text, expected):
    reader = labeler("chexpert-rules")
    changes = stated_changes(text, reader.stated_levels(text), reader.stated_levels(before), reader)
    name = "Support Devices" if "tube" in text else "Pleural Effusion"
    assert changes[reader.findings.index(name)] == (UNKNOWN if expected is None else CHANGES.index(expected))
    assert changes[reader.findings.index(reader.no_finding)] == UNKNOWN
