"""Pages and notebooks as a new user walks them: every command and cell, in order, in an empty folder."""

from pathlib import Path

import nbformat
import pydicom
import pytest
from command import console_commands, fedtar_here, walk
from nbclient import NotebookClient
from orthanc import orthanc, rest
from tiny_vlms import write_gemma

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_tour_works_in_its_order(repository, tmp_path):
    folder = tmp_path / "empty"
    outputs = list(walk(repository / "docs/tutorial/own-dicom.md", folder, FEDTAR_HOME=str(tmp_path / "home")).values())
    assert "visits that can be used" in outputs[3] and "leaves the site" in outputs[5]
    assert "DRAFT, not for clinical use" in outputs[8]
    assert (folder / "data-check.html").is_file()
    assert (folder / "simulator_workspace/fedtar/server/simulate_job/fedtar/report.html").is_file()
    assert not list((folder / "production").rglob("custom"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_folder_of_a_vision_language_model_becomes_a_federation(repository, tmp_path):
    page = repository / "docs/how-to/bring-a-vlm.md"
    assert len(console_commands(page)) == 10
    places = {"VLM": str(write_gemma(tmp_path / "weights")), "FEDTAR_HOME": str(tmp_path / "home")}
    outputs = list(walk(page, tmp_path / "empty", **places).values())
    assert "its model card" in outputs[1] and "its size is known" not in outputs[5]
    assert "DRAFT, not for clinical use" in outputs[8]
    assert (tmp_path / "empty/simulator_workspace/fedtar/server/simulate_job/fedtar/report.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_page_works_in_its_order(repository, tmp_path):
    with orthanc(tmp_path / "pacs") as pacs:
        assert fedtar_here("data", "synth", "-o", tmp_path / "h", "-n", 1, "--patients", 16, "--time-steps", 2)[0] == 0
        files = list((tmp_path / "h").glob("*/patients/*/*/ct/*"))
        for file in files:
            rest(f"{pacs}/instances", file.read_bytes())
        (ris := tmp_path / "empty" / "ris").mkdir(parents=True)
        first = {file.parent: pydicom.dcmread(file) for file in files}
        for ct, image in first.items():
            text = (ct.parent / "report.txt").read_text().replace("\n", "~")
            (ris / f"{image.StudyInstanceUID}.hl7").write_text(
                "MSH|^~\\&|RIS|H|||20240101||ORU^R01|1|P|2.5||||||UNICODE UTF-8\r"
                f"PID|1||{image.PatientID}\rOBR|1|||||||||||||||||||||20240101||RAD|F\r"
                f"OBX|1|ST|113014^DICOM Study^DCM||{image.StudyInstanceUID}||||||F\rOBX|2|TX|||{text}||||||F\r"
            )
        study = {"STUDY": first[files[0].parent].StudyInstanceUID, "PACS": f"{pacs}/dicom-web"}
        study |= {"FEDTAR_HOME": str(tmp_path / "home")}
        said = walk(repository / "docs/how-to/from-pacs.md", tmp_path / "empty", **study)
        assert f"{len(first)} reports" in list(said.values())[2]
        assert f"{len(first)} pulled" in list(said.values())[1] and "DRAFT" in list(said.values())[-1]
        assert len(rest(f"{pacs}/instances")) == len(files) + 1


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_a_notebook_runs_and_tells_no_path_of_the_machine_that_wrote_it(file, tmp_path, own_home):
    notebook = nbformat.read(file, as_version=4)
    shown = str([cell.get("outputs") for cell in notebook.cells])
    assert "/tmp/" not in shown and "/home/" not in shown and "Traceback" not in shown
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
