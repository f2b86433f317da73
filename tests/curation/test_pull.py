"""Studies of a PACS to a folder: a real Orthanc, and one that lies."""

import json
import subprocess
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import numpy as np
import pydicom
import pytest
from command import BIN, fedtar_here
from federation_process import wait_for
from make_dicom import JPEGLSLossless, compress, put, slice_dataset
from orthanc import orthanc, rest
from pydicom.datadict import dictionary_VR, tag_for_keyword
from refused import refused

from fedtar_flare.curation.pacs import Pacs
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.learning.dicom_sr import structured_report
from fedtar_flare.learning.drafting import Draft

NAME = "Geheimnis^Erika"


def instance(n, i=0, edit=lambda ds: None):
    """The file of instance ``i`` of study ``n``."""
    ds, uid = slice_dataset(np.full((8, 8), n), i), f"1.2.826.{n}"
    put(StudyInstanceUID=uid, SeriesInstanceUID=f"{uid}.1", PatientID=f"P{n}", PatientName=NAME, StudyDate="20240131",
        AccessionNumber=f"A{n:03d}", SOPInstanceUID=f"{uid}.1.{i + 1}")(ds)  # fmt: skip
    edit(ds)
    ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
    ds.save_as(file := BytesIO(), enforce_file_format=True)
    return file.getvalue()


def fill(url, numbers):
    for n in numbers:
        for i in range(2):
            rest(f"{url}/instances", instance(n, i))


@pytest.fixture(scope="module")
def pacs(tmp_path_factory):
    with orthanc(tmp_path_factory.mktemp("pacs") / "orthanc") as url:
        fill(url, range(12))
        yield url


@pytest.fixture
def arguments(tmp_path):
    def of(url, *rows, more=()):
        (query := tmp_path / "query.csv").write_text("\n".join(rows))
        return ["data", "pull", "--dicomweb", url, "--query", query, "-o", tmp_path / "out", "--rate", 1000, *more]

    return of


def pulled(command):
    code, out, err = fedtar_here(*command, "--json")
    return code, json.loads(out or "{}"), err


@pytest.mark.slow
def test_a_killed_pull_goes_on_where_it_stopped_and_a_changed_study_is_noticed(pacs, arguments, tmp_path):
    fill(pacs, range(12, 200))
    folder, command = tmp_path / "out", arguments(f"{pacs}/dicom-web", "StudyDate,Modality", "20240101-20241231,CT")
    process = subprocess.Popen([BIN / "fedtar", *map(str, command)], stderr=subprocess.PIPE)
    wait_for("20 studies", lambda: process.poll() is not None or len(list(folder.glob("finished/*.json"))) >= 20)
    process.kill()
    process.communicate()
    finished = [file for one in folder.glob("finished/*.json") for file in folder.glob(f"studies/{one.stem}/*/*.dcm")]
    before = {file: file.stat().st_mtime_ns for file in finished}
    code, done, _ = pulled(command)
    assert code == 0 and done["there"] == len(before) / 2 and done["there"] + done["pulled"] == 200
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    files = sorted(folder.glob("studies/*/*/*.dcm"))
    assert len(files) == 400 and not (folder / "parts").exists() and files[0].stat().st_mode & 0o077 == 0
    values = [pydicom.dcmread(file).pixel_array - 1024 for file in files[::9]]
    assert [np.unique(v).tolist() for v in values] == [[int(file.parts[-3].split(".")[-1])] for file in files[::9]]

    rest(f"{pacs}/instances", instance(7, 2))  # one more slice
    files[0].write_bytes(b"cut")
    files[2].write_bytes(files[2].read_bytes()[:-1] + b"x")
    code, done, _ = pulled([*command, "--verify"])
    assert (code, done["again"], done["there"], done["files"]) == (0, 3, 197, 7)
    code, done, _ = pulled(command)
    assert (code, done["pulled"], done["there"], len(list(folder.glob("studies/*/*/*.dcm")))) == (0, 0, 200, 401)


def test_only_what_the_query_names_comes_compressed_as_it_is_stored(pacs, arguments, tmp_path):
    series = put(SeriesInstanceUID="1.2.826.3.2", SOPInstanceUID="1.2.826.3.2.1", Modality="SR")
    rest(f"{pacs}/instances", instance(3, 5, lambda ds: [series(ds), compress(ds, JPEGLSLossless)]))
    rows = "A003;P3;SR", "A00?;P4;", "A01*;P10;CT", "A005;P6;"
    command = arguments(f"{pacs}/dicom-web/", "AccessionNumber;PatientID;Modality", *rows)
    code, done, _ = pulled(command)
    assert (code, done["asked"], done["files"]) == (0, 3, 5)
    there = {file.name: file for file in (tmp_path / "out").glob("studies/*/*/*.dcm")}
    assert {file.parts[-3] for file in there.values()} == {"1.2.826.3", "1.2.826.4", "1.2.826.10"}
    assert pydicom.dcmread(there["1.2.826.3.2.1.dcm"]).file_meta.TransferSyntaxUID == JPEGLSLossless
    rest(f"{pacs}/instances", instance(10, 2))
    _, done, _ = pulled(command)
    assert (done["again"], done["there"]) == (1, 2)


def test_a_draft_is_stored_beside_its_study_once_and_never_over_another(pacs, tmp_path):
    images = {n: tmp_path / f"{n}.dcm" for n in (5, 6)}
    for n, file in images.items():
        edit = put(PatientID="P6") if n == 5 else put()  # whose study 5 is at the PACS says another
        file.write_bytes(instance(n, edit=edit))
    draft, client = (
        Draft("No effusion.", "run", 1, "model", False, "2024-01-31"),
        Pacs(f"{pacs}/dicom-web", *[None] * 3),
    )
    before = set(rest(f"{pacs}/instances"))
    for new, text in ((True, "No effusion."), (False, "No effusion."), (True, "Effusion.")):
        report = structured_report(replace(draft, text=text, created=str(time.time())), images[6])
        assert client.store(report) is new
    with refused("no-study"):
        client.store(structured_report(draft, images[5]))
    added = [rest(f"{pacs}/instances/{one}/simplified-tags") for one in set(rest(f"{pacs}/instances")) - before]
    assert {(one["Modality"], one["PreliminaryFlag"], one["PatientID"]) for one in added} == {
        ("SR", "PRELIMINARY", "P6")
    }
    assert len(added) == 2 == len({one["SOPInstanceUID"] for one in added})


class Liar(BaseHTTPRequestHandler):
    """Answers what a test put in ``answers``: to queries of studies, of instances, and for a series."""

    def do_GET(self):
        self.server.seen.append(self.headers["Authorization"])
        kind = "series" if "/series/" in self.path else "instances" if "/instances" in self.path else "studies"
        given = self.server.answers[kind]
        status, head, chunks = given if isinstance(given, tuple) else (200, {}, [json.dumps(given).encode()])
        self.send_response(status)
        for name, value in head.items():
            self.send_header(name, value)
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(chunk)

    def log_message(self, *_):
        pass


@pytest.fixture
def liar():
    pytest.importorskip("dicomweb_client", reason="of the extra 'pacs'")
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        server.seen, server.daemon_threads, server.handle_error = [], True, lambda *_: None
        server.url = f"http://127.0.0.1:{server.server_port}/web"
        server.answers = {"studies": [record(**STUDY)], "instances": LISTED, "series": parts(instance(7))}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def record(**values):
    return {f"{tag_for_keyword(k):08X}": {"vr": dictionary_VR(k), "Value": [v]} for k, v in values.items()}


def parts(*files):
    body = [b"\r\n--x\r\nContent-Type: application/dicom\r\n\r\n" + file for file in files]
    return 200, {"Content-Type": 'multipart/related; type="application/dicom"; boundary=x'}, [*body, b"\r\n--x--"]


STUDY = {"StudyInstanceUID": "1.2.826.7", "PatientID": "P7", "AccessionNumber": "A007", "StudyDate": "20240131"}
LISTED = [record(SOPInstanceUID="1.2.826.7.1.1", SeriesInstanceUID="1.2.826.7.1", Modality="CT")]
ENDLESS = (b"\0" * (1 << 20) for _ in range(10**6))
CUT = (*parts()[:2], [parts(instance(7))[2][0][:-40]])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"studies": [record(**STUDY | {"PatientID": "P8"})]}, "not-asked-for"),
        ({"studies": [record(**STUDY | {"StudyInstanceUID": "../../etc"})]}, "that is none"),
        ({"studies": [{"0020000D": 5}]}, "not DICOMweb"),
        ({"studies": (200, {}, [b"<html>" + NAME.encode()])}, "not DICOMweb"),
        ({"studies": (200, {}, ENDLESS)}, "more than"),
        ({"instances": [record(SOPInstanceUID="1.2", SeriesInstanceUID="../x")]}, "no-series"),
        ({"instances": [record(SOPInstanceUID="/etc/passwd", SeriesInstanceUID="1.2")]}, "bad-uid"),
        ({"instances": []}, "no-series"),
        ({"series": parts(instance(8))}, "another-study"),
        ({"series": parts(instance(7, edit=put(PatientID="P8")))}, "another-study"),
        ({"series": parts(instance(7), instance(7, 1))}, "changed-meanwhile"),
        ({"series": parts()}, "changed-meanwhile"),
        ({"series": parts(NAME.encode())}, "bad-answer"),
        ({"series": CUT}, "bad-answer"),
        ({"series": (*parts()[:2], ENDLESS)}, "too-large"),
        ({"series": (404, {}, [])}, "http-404"),
        ({"series": (302, {"Location": "http://127.0.0.1:1/P7"}, [])}, "127.0.0.1:1,"),
        ({"studies": (401, {}, [])}, "HTTP 401"),
    ],
)
def test_a_pacs_that_lies_is_refused_and_leaves_no_study(liar, arguments, tmp_path, change, reason, caplog, recwarn):
    liar.answers |= change
    (token := tmp_path / "token").write_text("abc.def")
    token.chmod(0o600)
    with applied(Limits(file_bytes=1 << 20)):
        code, done, err = pulled(arguments(liar.url, "PatientID", "P7", more=["--token", token]))
    text = f"{err}{json.dumps(done)}{caplog.text}{[str(one.message) for one in recwarn]}"
    assert code == 1 and reason in text
    assert not any(word in text for word in (NAME, "P7", "abc.def", "Traceback"))
    assert not list((tmp_path / "out/studies").glob("*")) and not list((tmp_path / "out/finished").glob("*"))
    assert set(liar.seen) == {"Bearer abc.def"}


@pytest.mark.parametrize(
    ("url", "mode", "rows", "word"),
    [
        ("http://127.0.0.1/web", 0o644, ("PatientID", "P7"), "chmod 600"),
        ("http://pacs.example/web", 0o600, ("PatientID", "P7"), "https"),
        ("https://me:secret@pacs.example/web", 0o600, ("PatientID", "P7"), "without a password"),
        ("http://127.0.0.1/web", 0o600, ("PatientName", "P7"), "PatientName"),
        ("http://127.0.0.1/web", 0o600, ("PatientID,Modality", ",CT"), "names no study"),
    ],
)
def test_what_would_give_away_a_secret_or_ask_for_everything_is_refused(arguments, tmp_path, url, mode, rows, word):
    pytest.importorskip("dicomweb_client", reason="of the extra 'pacs'")
    (token := tmp_path / "token").write_text("abc.def\n")
    token.chmod(mode)
    code, _, err = pulled(arguments(url, *rows, more=["--token", token]))
    assert code == 2 and word in err and "secret" not in err.replace("holds a secret", "")
