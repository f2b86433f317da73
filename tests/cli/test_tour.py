"""``docs/tutorial/own-dicom.md`` as a new user walks it: every command, in order, in an empty folder."""

import pytest
from command import console_commands, walk
from tiny_vlms import write_gemma

PAGE = "docs/tutorial/own-dicom.md"


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


VLM_PAGE = "docs/how-to/bring-a-vlm.md"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_folder_of_a_vision_language_model_becomes_a_federation(repository, tmp_path):
    assert len(console_commands(repository / VLM_PAGE)) == 10
    places = {"VLM": str(write_gemma(tmp_path / "weights")), "FEDTAR_HOME": str(tmp_path / "home")}
    outputs = list(walk(repository / VLM_PAGE, tmp_path / "empty", **places).values())
    assert "its model card" in outputs[1] and "its size is known" not in outputs[5]
    assert "DRAFT, not for clinical use" in outputs[8]
    assert (tmp_path / "empty/simulator_workspace/fedtar/server/simulate_job/fedtar/report.html").is_file()
