"""How many functions, files and rooms a reader meets who follows one task: it may shrink, and not grow."""

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("walk", "functions", "files", "rooms"),
    [("site", 255, 41, 10), ("server", 347, 51, 12), ("scores", 208, 14, 4), ("setting", 76, 26, 10)],
)
def test_a_walk_stays_short(repository, home, walk, functions, files, rooms):
    command = [sys.executable, "-m", "tools.walk_count", walk]
    environment = {**os.environ, "FEDTAR_HOME": str(home)}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = map(int, re.findall(r"\d+", done.stdout))
    assert all(count <= most for count, most in zip(counts, (functions, files, rooms), strict=True)), done.stdout
