"""``docs/how-to/from-pacs.md`` as a hospital walks it, with an Orthanc."""

import pydicom
import pytest
from command import fedtar_here, walk
from orthanc import orthanc, rest


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
        said = walk(
            repository / "docs/how-to/from-pacs.md", tmp_path / "empty", FEDTAR_HOME=str(tmp_path / "home"), **study
        )
        assert f"{len(first)} reports" in list(said.values())[2]
        assert f"{len(first)} pulled" in list(said.values())[1] and "DRAFT" in list(said.values())[-1]
        assert len(rest(f"{pacs}/instances")) == len(files) + 1
