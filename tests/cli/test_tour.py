"""``docs/tutorial/own-dicom.md`` as a new user walks it: every command, in order, in an empty folder."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from command import BIN, end_session


def commands(page: Path) -> list[str]:
    """What stands after ``$`` in the page's console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_tour_has_ten_commands(repository):
    assert len(commands(repository / "docs" / "tutorial" / "own-dicom.md")) == 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_tour_works_in_its_order(repository, tmp_path):
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FEDTAR_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    folder = tmp_path / "empty"
    folder.mkdir()
    printed = {}
    for command in commands(repository / "docs" / "tutorial" / "own-dicom.md"):
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            printed[command], _ = process.communicate(timeout=1200)
        finally:
            end_session(process.pid)
        assert process.returncode == 0, f"{command}\n{printed[command][-3000:]}"
    outputs = list(printed.values())
    assert "visits that can be used" in outputs[3]
    assert "leaves the site" in outputs[5]
    assert "DRAFT, not for clinical use" in outputs[8]
    assert (folder / "data-check.html").is_file()
    assert (folder / "simulator_workspace/fedtar/server/simulate_job/fedtar/report.html").is_file()
    assert not list((folder / "production").rglob("custom"))
