"""A blinded reading, from the page through a browser to the table."""

import json
import re
import shutil

import numpy as np
import pytest
from browser import CHROMIUM, chromium
from command import console_commands
from command import fedtar_here as here
from sklearn.metrics import cohen_kappa_score

from fedtar_flare.learning.evaluation import write_report_scores
from fedtar_flare.metrics.agreement import kappa

PATIENTS = [f"patient-{i // 2}" for i in range(24)]


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "20260101-000000-aaaaaaaa" / "north"
    rows = [
        {"patient_id": who, "visit_id": f"visit-{i}", "personal": True, "text": f"draft {i} </script> & 'q'",
         "reference": f"reference\n{i}"} for i, who in enumerate(PATIENTS)
    ]  # fmt: skip
    folder.mkdir(parents=True)
    write_report_scores(folder, 3, rows)
    return folder


@pytest.fixture
def made(state):
    """The page, what it shows, and its key."""
    code, out, err = here("read", state, "--json")
    assert code == 0, err
    page = next(state.glob("reading-*.html"))
    assert json.loads(out) == {"page": str(page), "cases": 24}
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text())[1])
    return page, data, json.loads(page.with_suffix(".json").read_text())["cases"]


def of(made, state, name, choose, **changes):
    """The answers file of the reader ``name`` who says ``choose(case, draft's side)`` of each case."""
    answers = [{"case": i, **choose(i, one["draft"])} for i, one in enumerate(made[2], start=1)]
    file = state.parent / f"{name}.json"
    file.write_text(json.dumps({"page": made[1]["page"], "reader": name, "answers": answers} | changes))
    return file


def fair(case, draft):
    """One reader's opinion: the draft is as good as the reference, and both have an error in every fourth case."""
    return {"preference": "same", "error_a": case % 4 == 0, "error_b": case % 4 == 0, "acceptable": "both"}


def hard(case, draft):
    """Another's: the reference is always better, and the draft has an error in every second case."""
    other = {"A": "B", "B": "A"}[draft]
    errors = {f"error_{side.lower()}": side == draft and case % 2 == 0 for side in "AB"}
    return {"preference": other, **errors, "acceptable": other}


def test_the_page_hides_who_and_which_is_the_draft_and_its_key_tells(made, state):
    page, data, key = made
    assert {file.stat().st_mode & 0o777 for file in state.glob("reading-*")} == {0o600}
    assert {tuple(one) for one in data["cases"]} == {("a", "b")} and not re.search("patient-|visit-", page.read_text())
    assert {one["draft"] for one in key} == {"A", "B"} and len({one["visit_id"] for one in key}) == 24
    for shown, one in zip(data["cases"], key, strict=True):
        number = one["visit_id"].removeprefix("visit-")
        sides = (f"draft {number} </script> & 'q'", f"reference {number}")
        assert (shown["a"], shown["b"]) == (sides if one["draft"] == "A" else sides[::-1])
    code, _, err = here("read", state, "--visit-ids", "--cases", 3, "-o", state.parent / "own.html")
    assert code == 0 and len(set(re.findall("visit-[0-9]+", (state.parent / "own.html").read_text()))) == 3, err


def test_shares_and_agreement_are_those_of_the_answers(made, state):
    files = [of(made, state, "AB", fair), of(made, state, "C D", hard)]
    code, out, err = here("read", state, "--answers", *files, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["cases"], found["patients"], found["read_by_all"]) == (24, 12, 24)
    values = {
        name: [one[side][0] for side in ("draft", "reference", "difference")] for name, one in found["scores"].items()
    }
    assert values["preferred"] == [0, 0.5, -0.5] and values["acceptable as it is"] == [0.5, 1, -0.5]
    assert values["significant error"] == pytest.approx([(6 + 12) / 48, 6 / 48, 12 / 48])
    assert all(one["difference"][1] <= one["difference"][0] <= one["difference"][2] for one in found["scores"].values())
    assert found["p"]["preferred"] < 0.01
    errors = [[i % 4 == 0 for i in range(24)] * 2, [i % 2 == 0 for i in range(24)] + [False] * 24]
    assert found["agreement"]["significant error"][0] == pytest.approx(cohen_kappa_score(*errors))
    table = here("read", state, "--answers", *files)[1]
    assert "24 cases of 12 patients; answers: AB 24, C D 24" in table and "Cohen's kappa of 24 cases" in table
    one = here("read", state, "--answers", files[0])[1]
    assert "agreement" not in one and "preferred            0.00 (0.00 to 0.00)" in one


def test_kappa_of_many_readers_is_fleiss_s():
    """The worked example of 14 raters and 10 subjects that textbooks share; its kappa is 0.210."""
    counts = ["0 0 0 0 14", "0 2 6 4 2", "0 0 3 5 6", "0 3 9 2 0", "2 2 8 1 1", "7 7 0 0 0", "3 2 6 3 0", "2 5 3 2 2",
              "6 5 2 1 0", "0 2 2 3 7"]  # fmt: skip
    codes = [np.repeat(np.arange(5), list(map(int, row.split()))) for row in counts]
    assert kappa(range(10), codes, 5).value() == pytest.approx(0.210, abs=5e-4)
    assert np.isnan(kappa([1, 2], [[0, 0], [0, 0]], 2).value())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"page": "0" * 16}, "did not make the page"),
        ({"page": "../../etc/passwd"}, "page"),
        ({"reader": "x\nAB 24"}, "reader"),
        ({"answers": [{"case": 25, **fair(1, "A")}]}, "no case 25"),
        ({"answers": [{"case": 1, **fair(1, "A")}] * 2}, "case 1 is answered twice"),
        ({"answers": [{"case": 1, **fair(1, "A"), "error_a": 1}]}, "error_a"),
        ({"answers": [{"case": 1, **fair(1, "A"), "preference": "C"}]}, "preference"),
        ({"answers": []}, "answers"),
        ({"key": "x"}, "unknown setting 'key'"),
    ],
)
def test_a_file_that_lies_is_refused(made, state, change, word):
    code, out, err = here("read", state, "--answers", of(made, state, "AB", fair, **change))
    assert code == 2 and word in err and not out


def test_files_of_one_reader_or_of_two_pages_are_refused(made, state):
    file = of(made, state, "AB", fair)
    assert "two files are of one reader" in here("read", state, "--answers", file, file)[2]
    other = of(made, state, "CD", fair, page="0" * 16)
    assert "different pages" in here("read", state, "--answers", file, other)[2]


def begin(browser, page, reader):
    browser.open(page)
    browser.value("document.getElementById('reader').focus()")
    browser.press(*reader, "Enter")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian package chromium)")
def test_a_reader_answers_by_keys_comes_back_and_saves(made, state, tmp_path):
    page = made[0]
    with chromium(tmp_path) as browser:
        begin(browser, page, "AB")
        assert browser.value("document.getElementById('where').textContent") == "Case 1 of 24"
        browser.press(*"1112", "Enter", *"3214", "ArrowLeft", "2", "ArrowRight", "Enter", *"11")
        begin(browser, page, "AB")  # to the first case that is not answered whole
        assert browser.value("document.getElementById('where').textContent") == "Case 3 of 24"
        assert browser.value("document.querySelectorAll('input:checked').length") == 2
        assert browser.value("performance.getEntriesByType('resource').length") == 0
        browser.press("s")
        browser.downloaded()
        begin(browser, page, "CD")
        assert "0 of 24 answered by CD" in browser.value("document.getElementById('progress').textContent")
    saved = json.loads((tmp_path / "answers-AB.json").read_text())["answers"]
    assert saved == [
        {"case": 1, "preference": "B", "error_a": False, "error_b": False, "acceptable": "B"},
        {"case": 2, "preference": "same", "error_a": True, "error_b": False, "acceptable": "neither"},
    ]
    out = here("read", state, "--answers", tmp_path / "answers-AB.json")[1]
    assert "2 cases of" in out and "answers: AB 2" in out


def test_the_commands_of_the_page_on_readings_run(repository, made, state, tmp_path):
    shutil.copytree(state, tmp_path / "STATE")
    for reader in ("AB", "CD"):
        shutil.copyfile(of(made, state, reader, hard), tmp_path / f"answers-{reader}.json")
    commands = console_commands(repository / "docs/how-to/read-drafts.md")
    assert len(commands) == 2
    for command in commands:
        code, _, err = here(*command.split()[1:], cwd=tmp_path)
        assert code == 0, err
