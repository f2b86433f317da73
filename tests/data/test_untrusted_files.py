"""What may stand in a file's place: pipes, devices, sockets, loops of links, files without end, odd ids."""

import os
import socket
from pathlib import Path

import pytest
import torch

from fedtar_flare.core.errors import DataError, FedTARError
from fedtar_flare.core.files import MOST_BYTES, read_json, read_tensors, read_yaml
from fedtar_flare.curation.report_sources import collect
from fedtar_flare.curation.unpack import unpack
from fedtar_flare.data.cells import read_key
from fedtar_flare.data.sources.manifest import read_manifest
from fedtar_flare.data.sources.tables import rows_of
from fedtar_flare.imaging.readers.ct import read_ct
from fedtar_flare.imaging.readers.dicom_files import headers
from fedtar_flare.imaging.readers.pictures import read_photograph, read_radiograph
from fedtar_flare.models.adapters.peft_file import read_adapter_info
from fedtar_flare.models.tokenizer import ReportTokenizer
from fedtar_flare.models.weights import load_weights, training_patients
from fedtar_flare.site.cohort import excluded_patients
from fedtar_flare.site.site_file import SiteConfig, read_site_file

pytestmark = pytest.mark.timeout(60)
HEAD = "patient_id,study_datetime,image,report,report_path\n"


def pipe(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


KINDS = {
    "pipe": pipe,
    "socket": listening,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop of links": lambda path: path.symlink_to(path),
    "nothing": lambda path: None,
}


def excluded(path):
    return excluded_patients(SiteConfig(source="manifest", path=path, exclude=path))


def adapter(path):
    path.with_name("adapter_model.safetensors").touch()
    return read_adapter_info(path.parent)


READERS = {
    "manifest": ("manifest.csv", read_manifest),
    "packed table": ("table.csv.gz", lambda path: list(rows_of(path, ["a"]))),
    "site file": ("fedtar.yaml", read_site_file),
    "YAML": ("a.yaml", lambda path: read_yaml(path, "names")),
    "JSON": ("a.json", read_json),
    "key": ("fedtar.key", read_key),
    "patients who withdrew": ("withdrawn.txt", excluded),
    "state": ("0001-02.safetensors", read_tensors),
    "weights": ("model.safetensors", lambda path: load_weights(torch.nn.Linear(2, 2), path)),
    "adapter": ("fedtar.json", adapter),
    "tokenizer": ("tokenizer.json", lambda path: ReportTokenizer.load(path, 8)),
    "data set": ("set.npz", lambda path: unpack(path, path.parent / "out")),
    "NIfTI": ("a.nii.gz", read_ct),
    "archive": ("a.zip", read_ct),
    "DICOMDIR": ("DICOMDIR", read_ct),
    "slice": ("a.dcm", read_ct),
    "film": ("a.dcm", read_radiograph),
    "picture": ("a.png", read_radiograph),
    "photograph": ("a.jpg", read_photograph),
}


def endless(path):
    """Three gigabytes of nothing."""
    path.touch()
    os.truncate(path, 3 << 30)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [*KINDS.values(), endless], ids=[*KINDS, "endless"])
def test_only_a_regular_file_is_read_and_none_that_would_fill_the_memory(make, reader, tmp_path):
    name, read = READERS[reader]
    make(path := tmp_path / name)
    with pytest.raises(FedTARError):
        read(path)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "loop of links"])
def test_reports_and_headers_pass_over_what_is_no_file(kind, tmp_path):
    for name in ("a.json", "a.hl7", "a.csv", "a.dcm"):
        KINDS[kind](tmp_path / name)
    rows, problems, _ = collect(tmp_path)
    assert rows == list(headers(tmp_path)) == [] and len(problems) == (4 if kind == "loop of links" else 0)
    assert training_patients(tmp_path / "a.dcm") == frozenset()


@pytest.mark.parametrize("name", ["a.json", "a.ndjson", "a.hl7", "a.csv"])
def test_a_document_longer_than_is_read_is_one_problem_or_few(name, tmp_path):
    (path := tmp_path / name).touch()
    os.truncate(path, MOST_BYTES + (1 << 20))
    try:
        rows, problems, _ = collect(path)
    except FedTARError:
        return
    assert rows == [] and 0 < len(problems) < 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_whose_image_or_report_is_no_file_is_left_out(kind, tmp_path):
    KINDS[kind](tmp_path / "a.png")
    (tmp_path / "ok.png").touch()
    KINDS[kind](tmp_path / "r.txt")
    rows = ["1,2020-01-01,a.png,Clear.,", "2,2020-01-01,ok.png,,r.txt", "3,2020-01-01,ok.png,Clear.,"]
    rows += [f"4,2020-01-01,{'a' * 300}.png,Clear.,", "5,2020-01-01,a\0b.png,Clear.,", "6,2020-01-01,ok.png,,a\0b.txt"]
    (tmp_path / "manifest.csv").write_text(HEAD + "\n".join(rows))
    reading = read_manifest(tmp_path)
    image = [] if kind == "folder" else ["no-image"]  # a folder may hold slices, which are looked for later
    expected = [*image, "no-report", "no-image", "no-image", "no-report"]
    assert [problem.reason for problem in reading.problems] == expected
    assert {patient.patient_id for patient in reading.patients()} == {"3"} | ({"1"} if kind == "folder" else set())


def test_the_first_image_says_its_kind_early_or_not_at_all(tmp_path):
    """A file of empty elements without end kept the command for hours."""
    (tmp_path / "a.dcm").write_bytes(bytes(128) + b"DICM")
    os.truncate(tmp_path / "a.dcm", 3 << 30)
    (tmp_path / "manifest.csv").write_text(f"{HEAD}1,2020-01-01,a.dcm,Clear.,\n")
    assert [problem.reason for problem in read_manifest(tmp_path).problems] in ([], ["unreadable"])


@pytest.mark.parametrize("character", ["\0", "\x1b", "\x7f", "\x85", "\ufffd"])
def test_an_id_with_a_control_character_is_refused_by_its_row_alone(character, tmp_path):
    (tmp_path / "ok.png").touch()
    rows = [f"Mill{character}er,2020-01-01,ok.png,Clear.,", "3,2020-01-01,ok.png,Clear.,"]
    (tmp_path / "manifest.csv").write_text(HEAD + "\n".join(rows))
    (problem,) = read_manifest(tmp_path).problems
    assert problem.reason == "bad-id" and "row 2" in str(problem)
    assert problem.public == DataError("", reason="bad-id").public
    assert "Mill" not in str(problem)
    (tmp_path / "withdrawn.txt").write_text(f"# who\nMill{character}er\n")
    with pytest.raises(FedTARError, match="line 2"):
        excluded(tmp_path / "withdrawn.txt")


@pytest.mark.parametrize("line", ['"' + "a\n" * 6_000_000, "a," * 6_000_000 + "\n", '"\n",' * 3_000_000])
def test_a_row_is_bounded_in_all_its_lines_and_cells_together(line, tmp_path):
    (tmp_path / "manifest.csv").write_text(HEAD + line)
    with pytest.raises(FedTARError, match="row 2"):
        read_manifest(tmp_path)
