"""A blinded reading, from the page through a browser to the table."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from command import console_commands, failing
from command import fedtar_here as here
from kits import write_radiographs
from PIL import Image
from scipy.stats import kendalltau
from sklearn.metrics import cohen_kappa_score

from fedtar_flare.core.files import write_json, write_text
from fedtar_flare.curation.check import included
from fedtar_flare.learning.evaluation import write_report_scores
from fedtar_flare.metrics.significance import kappa_score

ROWS = [
    {"patient_id": f"patient-{i // 2}", "visit_id": f"visit-{i}", "personal": True,
     "text": f"draft {i} </script> & 'q'", "reference": f"reference\n{i}"} for i in range(24)
]  # fmt: skip


def data_of(page):
    """What a page shows."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text())[1])


@pytest.fixture
def made(tmp_path):
    """The state, the page, what it shows, and its key."""
    state = write_report_scores(tmp_path / "STATE", 3, ROWS).parent
    here("read", state)
    (page,) = state.glob("reading-*.html")
    return state, page, data_of(page), json.loads(page.with_suffix(".json").read_text())["cases"]


def answers_of(made, reader, choose, changes=()):
    """The answers file of a reader who says ``choose(case, draft's side)`` of each case."""
    answers = [{"case": i, **choose(i, one["draft"])} for i, one in enumerate(made[3], start=1)]
    said = {"page": made[2]["page"], "reader": reader, "answers": answers} | dict(changes)
    return write_json(made[0].with_name(f"answers-{reader}.json"), said)


def fair(case, draft):
    """The draft is as good as the reference, and both have an error in every fourth case."""
    return {"preference": "same", "error_a": case % 4 == 0, "error_b": case % 4 == 0, "acceptable": "both"}


def hard(case, draft):
    """The reference is always better, and the draft has an error in every second case."""
    errors = {f"error_{side.lower()}": side == draft and case % 2 == 0 for side in "AB"}
    return errors | dict.fromkeys(("preference", "acceptable"), {"A": "B", "B": "A"}[draft])


def test_the_page_hides_who_and_which_is_the_draft_and_its_key_tells(made):
    state, page, data, key = made
    assert {file.stat().st_mode & 0o777 for file in state.glob("reading-*")} == {0o600}
    assert {tuple(one) for one in data["cases"]} == {("a", "b")} and not re.search("patient-|visit-", page.read_text())
    assert {one["draft"] for one in key} == {"A", "B"} and len({one["visit"] for one in key}) == 24
    for shown, one in zip(data["cases"], key, strict=True):
        sides = [f"{what} {one['visit'][6:]}" for what in ("draft", "reference")]
        both = [shown["a"].split(" <")[0], shown["b"].split(" <")[0]]
        assert both == (sides if one["draft"] == "A" else sides[::-1])


def test_images_lie_in_a_private_folder_under_names_that_tell_no_side(tmp_path):
    write_radiographs(tmp_path, 4, visits=2)
    visits = [visit for patient in included(tmp_path)[0] for visit in patient.visits]
    rows = [row | {"patient_id": visit.patient_id, "visit_id": visit.visit_id, "reference": visit.report}
            for row, visit in zip(ROWS, visits, strict=False)]  # fmt: skip
    state = write_report_scores(tmp_path / "STATE", 3, rows).parent
    here("read", state, "--images", tmp_path / "manifest.csv", "-o", tmp_path / "pages/reading.html")
    (folder,) = (tmp_path / "pages").glob("reading-*")
    cases = json.loads((state / folder.name).with_suffix(".json").read_text())["cases"]
    shown = data_of(tmp_path / "pages/reading.html")["cases"]
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())] == [0o700, *[0o600] * 6]
    for number, (case, one) in enumerate(zip(cases, shown, strict=True), start=1):
        at = next(i for i, visit in enumerate(visits) if visit.visit_id == case["visit"])
        expected = {"now": at} | ({"before": at - 1} if at % 2 else {})
        names = {when: f"{folder.name}/{number}-{when}.png" for when in expected}
        assert {when: one[when] for when in one if when not in "ab"} == names
        for when, i in expected.items():
            small = [np.asarray(Image.open(file).convert("L").resize((16, 16)), float).ravel()
                     for file in (tmp_path / "pages" / one[when], visits[i].image)]  # fmt: skip
            assert np.corrcoef(small)[0, 1] > 0.9
    before = sorted(tmp_path.rglob("*"))
    assert here("read", state, "--images", tmp_path / "manifest.csv", "-o", tmp_path / "pages")[0] == 1
    assert sorted(tmp_path.rglob("*")) == before, "of a page that cannot be written, no key and no image stays"
    write_report_scores(state, 4, [row | {"reference": "Another."} for row in rows])
    assert "4 of 4 cases are not in it" in here("read", state, "--images", tmp_path / "manifest.csv")[2]


def test_the_commands_of_the_page_give_the_answers_shares_and_agreement(made, repository):
    files = [answers_of(made, "AB", fair), answers_of(made, "CD", hard)]
    folder, commands = made[0].parent, console_commands(repository / "docs/how-to/read-drafts.md")
    _, out = (here(*command.split()[1:], cwd=folder)[1] for command in commands)
    assert "24 cases of 12 patients; answers: AB 24, CD 24" in out and "Cohen's kappa of 24 cases" in out
    assert len(set(re.findall("visit-[0-9]+", (folder / "reading.html").read_text()))) == 24
    found = json.loads(here("read", made[0], "--answers", *files, "--json")[1])
    values = {name: [value for value, *_ in one.values()] for name, one in found["scores"].items()}
    assert values["preferred"] == [0, 0.5, -0.5] and values["acceptable as it is"] == [0.5, 1, -0.5]
    assert values["significant error"] == pytest.approx([(6 + 12) / 48, 6 / 48, 12 / 48])
    assert all(low <= value <= high for one in found["scores"].values() for value, low, high in one.values())
    errors = [[i % 4 == 0 for i in range(24)] * 2, [i % 2 == 0 for i in range(24)] + [False] * 24]
    assert found["agreement"]["significant error"][0] == pytest.approx(cohen_kappa_score(*errors))
    assert found["p"]["preferred"] < 0.01 and "agreement" not in here("read", made[0], "--answers", files[0])[1]


def test_each_score_s_tau_is_with_what_readers_said_of_the_drafts_that_they_read(tmp_path):
    texts = [" ".join(["Small left effusion."] * (1 + i // 2)) for i in range(24)]
    rows = [row | {"text": text, "reference": texts[-1]} for row, text in zip(ROWS, texts, strict=True)]
    state = write_report_scores(tmp_path / "STATE", 3, rows).parent
    here("read", state)
    (key_file,) = state.glob("reading-*.json")
    key = json.loads(key_file.read_text())["cases"]
    numbers = [int(case["visit"].removeprefix("visit-")) for case in key]
    made = state, None, {"page": key_file.stem.removeprefix("reading-")}, key

    def longer(case, draft):
        good = numbers[case - 1] >= 12
        return fair(4 if not good else 1, draft) | {"preference": draft if numbers[case - 1] >= 18 else "same"}

    command = ["read", state, "--answers", answers_of(made, "AB", longer), "-o", tmp_path / "tables.html"]
    (tau, low, high), drafts = json.loads(here(*command, "--json")[1])["tau"]["rouge_l"]
    said = np.digitize(numbers, [12, 18])
    lengths = [len(texts[number]) for number in numbers]
    assert tau == pytest.approx(kendalltau(lengths, said).statistic) and low <= tau <= high and drafts == 24
    out = here(*command)[1]
    assert re.search(r"ROUGE-L +0\.\d+ \(.* to .*\) +Kendall's tau-b, 24 drafts", out) and "length ratio" not in out
    page = (tmp_path / "tables.html").read_text()
    assert "ROUGE-L" in page and "<h1>What readers said</h1>" in page
    write_report_scores(state, 4, [row | {"text": "Other."} for row in rows])
    assert json.loads(here(*command, "--json")[1])["tau"] == {}, "these drafts are not those that were read"


def test_kappa_of_many_readers_is_fleiss_s():
    """The worked example of 14 raters and 10 subjects that textbooks share; its kappa is 0.210."""
    rows = "0 0 0 0 14|0 2 6 4 2|0 0 3 5 6|0 3 9 2 0|2 2 8 1 1|7 7 0 0 0|3 2 6 3 0|2 5 3 2 2|6 5 2 1 0|0 2 2 3 7"
    codes = [np.repeat(np.arange(5), list(map(int, row.split()))) for row in rows.split("|")]
    assert kappa_score(range(10), codes, 5).value() == pytest.approx(0.210, abs=5e-4)
    assert np.isnan(kappa_score([1, 2], [[0, 0], [0, 0]], 2).value())


def test_a_file_that_lies_is_refused(made):
    one, other = {"case": 1, **fair(1, "A")}, answers_of(made, "CD", fair)
    lies = {"page": ["0" * 16, "../../etc/passwd"], "reader": ["x\nAB 24", "CD"], "key": ["x"]}
    lies |= {"answers": [[one | {"case": 25}], [one, one], [one | {"error_a": 1}]]}
    words = {"page": "page", "reader": "reader", "key": "unknown setting 'key'", "answers": "case|error_a"}
    for name, value in ((name, value) for name, values in lies.items() for value in values):
        error = failing("read", made[0], "--answers", answers_of(made, "AB", fair, {name: value}), other)
        assert re.search(words[name], error), (name, value)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (Debian package chromium)")
def test_a_reader_answers_by_keys_comes_back_and_saves(made, tmp_path):
    """With a script that presses keys, which the page's own policy is told to let in; what is dumped is the file."""
    (state, page), driver = made[:2], Path(__file__).with_name("reader.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(driver.encode()).digest())
    html = page.read_text().replace("script-src '", f"script-src 'sha256-{digest.decode()}' '", 1)
    page.write_text(html.replace("</main>", f"<script>{driver}</script></main>"))
    options = ["--headless", "--no-sandbox", "--virtual-time-budget=5000", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run(["chromium", *options, page.as_uri()], capture_output=True, text=True, timeout=600)
    file, cases = json.loads(unescape(re.search("<body>(.*)</body>", done.stdout, re.S)[1]))
    assert cases == [1, 1, 3], "each reader begins, or goes on at the first case that is not answered whole"
    answers = [list(one.values()) for one in json.loads(file)["answers"]]
    assert answers == [[1, "B", False, False, "B"], [2, "same", True, False, "neither"]]
    assert "answers: AB 2" in here("read", state, "--answers", write_text(tmp_path / "saved.json", file))[1]
