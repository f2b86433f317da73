"""``fedtar data partition``: what it writes and says."""

import json

import numpy as np
import pytest
from command import failing, passing
from PIL import Image


@pytest.fixture
def manifest(tmp_path):
    Image.fromarray(np.arange(100, dtype=np.uint8).reshape(10, 10)).save(tmp_path / "f.png")
    rows = [f"p{i},2020-0{t}-01,f.png,FINDINGS: Clear {i}. IMPRESSION: Fine.,F" for i in range(8) for t in (1, 2)]
    rows.append("p9,,f.png,FINDINGS: Clear.,F")
    (tmp_path / "manifest.csv").write_text("\n".join(["patient_id,study_datetime,image,report,sex", *rows]))
    return tmp_path / "manifest.csv"


def test_divide_and_say_so(manifest, tmp_path):
    options = ("--option", "sections=[findings]", "--option", "cleaning=r2gen-v1")
    divide = ("data", "partition", "manifest", manifest, "--by", "random", "-n", 3, "--out")
    out = passing(*divide, tmp_path / "a", "--time-steps", 2, *options)
    assert "site-1  3 patients, 6 visits (t=1: 3, t=2: 3)" in out and "Left out: no-date 1" in out
    assert "FEDTAR_SITES=" in out and "-n site-1,site-2,site-3" in out
    assert "clear 0 ." in "".join(p.read_text() for p in (tmp_path / "a").glob("*/manifest.csv"))
    told = json.loads(passing(*divide, tmp_path / "b", "--json"))
    assert told["left_out"] == {"no-date": 1}
    assert [site["patients"] for site in told["sites"]] == [3, 3, 2]
    assert told["sites"][0]["visits_per_step"] == [3, 3, 0]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--by", "random"), "needs -n"),
        (("--by", "institution", "-n", 2), "the institutions are the sites"),
        (("--by", "chance", "-n", 2), "'chance' is unknown"),
        (("--by", "random", "-n", 2, "--option", "same_day"), "NAME=VALUE"),
        (("--by", "random", "-n", 2, "--option", "same_dy=merge"), "did you mean 'same_day'"),
        (("--by", "random", "-n", 20), "8 patient(s) cannot fill 20 sites"),
    ],
)
def test_wrong_use(manifest, tmp_path, arguments, said):
    assert said in failing("data", "partition", "manifest", manifest, "--out", tmp_path / "o", *arguments)
    assert not (tmp_path / "o").exists()
