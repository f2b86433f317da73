"""``docs/how-to/from-pacs.md`` as a hospital walks it, with an Orthanc."""

import csv

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
        with (tmp_path / "reports.csv").open("w", newline="") as table:
            writer = csv.writer(table)
            writer.writerow(["study_instance_uid", "report"])
            first = {file.parent: pydicom.dcmread(file).StudyInstanceUID for file in files}
            writer.writerows([uid, (ct.parent / "report.txt").read_text()] for ct, uid in first.items())
        (folder := tmp_path / "empty").mkdir()
        (tmp_path / "reports.csv").rename(folder / "reports.csv")
        study = {"STUDY": first[files[0].parent], "PACS": f"{pacs}/dicom-web"}
        said = walk(repository / "docs/how-to/from-pacs.md", folder, FEDTAR_HOME=str(tmp_path / "home"), **study)
        assert f"{len(first)} pulled" in list(said.values())[1] and "DRAFT" in list(said.values())[-1]
        assert len(rest(f"{pacs}/instances")) == len(files) + 1
