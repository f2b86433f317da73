"""A reader's walks through the code may shrink and not grow; pages made from the code are those of the code."""

import os
import re
import subprocess
import sys

import pytest

from tools.make_reference import PAGES, REFERENCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("walk", "functions", "files", "rooms"),
    [("site", 250, 40, 10), ("server", 341, 51, 12), ("scores", 190, 14, 4), ("setting", 76, 25, 10)],
)
def test_a_walk_stays_short(repository, tmp_path, walk, functions, files, rooms):
    command = [sys.executable, "-m", "tools.walk_count", walk]
    environment = {**os.environ, "FEDTAR_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = map(int, re.findall(r"\d+", done.stdout))
    assert all(count <= most for count, most in zip(counts, (functions, files, rooms), strict=True)), done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name):
    if name == "cli.md" and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse words its help differently in other versions of Python")
    assert PAGES[name]() == (REFERENCE / name).read_text(encoding="utf-8"), "run python -m tools.make_reference"
