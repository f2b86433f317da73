"""``docs/tutorial/own-dicom.md`` as a new user walks it: every command, in order, in an empty folder."""

import pytest
from command import console_commands, walk

PAGE = "docs/tutorial/own-dicom.md"


def test_the_tour_has_ten_commands(repository):
    assert len(console_commands(repository / PAGE)) == 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_tour_works_in_its_order(repository, tmp_path):
    folder = tmp_path / "empty"
    outputs = list(walk(repository / PAGE, folder, FEDTAR_HOME=str(tmp_path / "home")).values())
    assert "visits that can be used" in outputs[3]
    assert "leaves the site" in outputs[5]
    assert "DRAFT, not for clinical use" in outputs[8]
    assert (folder / "data-check.html").is_file()
    assert (folder / "simulator_workspace/fedtar/server/simulate_job/fedtar/report.html").is_file()
    assert not list((folder / "production").rglob("custom"))
