"""Studies of a PACS to a folder: a real Orthanc, and one that lies."""

import json
import random
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pydicom
import pytest
import trustme
from command import BIN, fedtar_here
from federation_process import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from make_dicom import encode, put, slice_dataset
from orthanc import orthanc, rest
from pydicom.datadict import dictionary_VR, tag_for_keyword
from pydicom.uid import JPEGLSLossless
from refused import refused

from fedtar_flare.curation.pacs import Pacs
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.learning.draft_documents import diagnostic_report, structured_report
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


@pytest.fixture(scope="module")
def pacs(tmp_path_factory):
    with orthanc(tmp_path_factory.mktemp("pacs") / "orthanc") as url:
        for n in range(24):
            rest(f"{url}/instances", instance(n // 2, n % 2))
        yield url


def arguments(tmp_path, url, *rows):
    (query := tmp_path / "query.csv").write_text("\n".join(rows))
    return ["data", "pull", "--dicomweb", url, "--query", query, "-o", tmp_path / "out", "--rate", 1000]


def pulled(command):
    code, out, err = fedtar_here(*command, "--json")
    return code, json.loads(out or "{}"), err


@pytest.mark.slow
def test_a_killed_pull_goes_on_where_it_stopped_and_a_changed_study_is_noticed(pacs, tmp_path):
    for n in range(24, 400):
        rest(f"{pacs}/instances", instance(n // 2, n % 2))
    rows, folder = ("StudyDate,Modality", "20240101-20241231,CT"), tmp_path / "out"
    command = arguments(tmp_path, f"{pacs}/dicom-web", *rows)
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


def test_studies_of_the_query_alone_come_compressed_as_stored(pacs, tmp_path):
    series = put(SeriesInstanceUID="1.2.826.3.2", SOPInstanceUID="1.2.826.3.2.1", Modality="SR")
    rest(f"{pacs}/instances", instance(3, 5, lambda ds: [series(ds), encode(ds, JPEGLSLossless)]))
    rows = "A003;P3;SR", "A00?;P4;", "A01*;P10;CT", "A005;P6;"
    command = arguments(tmp_path, f"{pacs}/dicom-web/", "AccessionNumber;PatientID;Modality", *rows)
    code, done, _ = pulled(command)
    assert (code, done["asked"], done["files"]) == (0, 3, 5)
    there = {file.name: file for file in (tmp_path / "out").glob("studies/*/*/*.dcm")}
    assert {file.parts[-3] for file in there.values()} == {"1.2.826.3", "1.2.826.4", "1.2.826.10"}
    assert pydicom.dcmread(there["1.2.826.3.2.1.dcm"]).file_meta.TransferSyntaxUID == JPEGLSLossless
    rest(f"{pacs}/instances", instance(10, 2))
    _, done, _ = pulled(command)
    assert (done["again"], done["there"]) == (1, 2)


def test_a_draft_is_stored_beside_its_study_once_and_never_over_another(pacs, tmp_path):
    (image := tmp_path / "6.dcm").write_bytes(instance(6))
    (other := tmp_path / "5.dcm").write_bytes(instance(5, edit=put(PatientID="P6")))  # P5 at the PACS
    client, before = Pacs(f"{pacs}/dicom-web", None, None, None), set(rest(f"{pacs}/instances"))
    for text, new in (("Clear.", True), ("Clear.", False), ("Effusion.", True)):
        draft = Draft(text, "run", 1, "model", False, created=str(time.time()))
        assert client.store(structured_report(draft, image)) is new
    with refused("no-study"):
        client.store(structured_report(draft, other))
    as_fhir, study = diagnostic_report(draft, image), {"system": "urn:dicom:uid", "value": "urn:oid:1.2.826.6"}
    assert as_fhir["status"] == "preliminary" and as_fhir["meta"]["security"][0]["code"] == "AIAST"
    assert as_fhir["imagingStudy"] == [{"identifier": study}]
    assert as_fhir["identifier"][0]["value"] == f"urn:oid:{structured_report(draft, image).SOPInstanceUID}"
    added = [rest(f"{pacs}/instances/{one}/simplified-tags") for one in set(rest(f"{pacs}/instances")) - before]
    assert {(d["Modality"], d["PreliminaryFlag"], d["PatientID"]) for d in added} == {("SR", "PRELIMINARY", "P6")}
    assert len(added) == len({one["SOPInstanceUID"] for one in added}) == 2


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
def liar(tmp_path):
    """It speaks TLS, and only with who has a certificate of its authority: ``login``."""
    pytest.importorskip("dicomweb_client", reason="of the extra 'pacs'")
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.configure_trust(context)
    authority.issue_cert("localhost").configure_cert(context)
    context.verify_mode = ssl.CERT_REQUIRED
    files = {name: tmp_path / name for name in ("ca", "cert", "token")}
    authority.cert_pem.write_to_path(files["ca"])
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(files["cert"])
    files["token"].write_text("abc.def\n")
    for file in files.values():
        file.chmod(0o600)
    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.seen, server.daemon_threads, server.handle_error = [], True, lambda *_: None
        server.url, server.files = f"https://localhost:{server.server_port}/web", files
        server.login = [word for name, file in files.items() for word in (f"--{name}", file)]
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
        ({"studies": [record(**STUDY | {"StudyInstanceUID": "../../etc"})]}, "no UID"),
        ({"studies": [{"0020000D": 5}]}, "not DICOMweb"),
        ({"studies": (200, {}, [b"<html>" + NAME.encode()])}, "not DICOMweb"),
        ({"studies": (200, {}, ENDLESS)}, "more than"),
        ({"instances": [record(SOPInstanceUID="1.2", SeriesInstanceUID="../x")]}, "no-series"),
        ({"instances": [record(SOPInstanceUID="/etc/passwd", SeriesInstanceUID="1.2")]}, "bad-uid"),
        ({"instances": []}, "no-series"),
        ({"studies": [record(**STUDY, NumberOfStudyRelatedInstances=2)]}, "may-be-incomplete"),
        ({"instances": (200, {"Warning": '299 pacs: "more"'}, [json.dumps(LISTED).encode()])}, "may-be-incomplete"),
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
def test_a_pacs_that_lies_is_refused_and_leaves_no_study(liar, tmp_path, monkeypatch, change, reason, caplog, recwarn):
    monkeypatch.setattr("fedtar_flare.curation.pacs.ANSWER_BYTES", 1 << 20)
    liar.answers |= change
    with applied(Limits(file_bytes=1 << 20)):
        code, done, err = pulled([*arguments(tmp_path, liar.url, "PatientID", "P7"), *liar.login])
    text = f"{err}{json.dumps(done)}{caplog.text}{[str(one.message) for one in recwarn]}"
    assert code == 1 and reason in text
    assert not any(word in text for word in (NAME, "P7", "abc.def", "Traceback"))
    assert not list((tmp_path / "out/studies").glob("*")) and not list((tmp_path / "out/finished").glob("*"))
    assert set(liar.seen) == {"Bearer abc.def"}


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_pacs_that_sends_a_byte_now_and_then_does_not_keep_the_command_waiting(liar, tmp_path, monkeypatch, where):
    monkeypatch.setattr("fedtar_flare.curation.pacs.SECONDS", 0.3)
    over = threading.Event()
    drops = (b" " for _ in iter(lambda: over.wait(0.01), True))
    liar.answers["studies"] = (
        (200, {}, drops) if where == "body" else (200, SimpleNamespace(items=lambda: [*drops]), [])
    )
    try:
        code, _, err = pulled([*arguments(tmp_path, liar.url, "PatientID", "P7"), *liar.login])
    finally:
        over.set()
    assert code == 1 and "Traceback" not in err and not list((tmp_path / "out/studies").glob("*"))


def test_a_part_after_a_preamble_a_series_of_number_0_and_a_list_that_may_go_on(liar, tmp_path):
    """What came is there, and the exit code says that more may be missing."""
    liar.answers["instances"] = [LISTED[0] | record(SeriesNumber=0)]
    status, head, (body, end) = liar.answers["series"]
    liar.answers["series"] = (status, head, [b"This is MIME.\r\n\r\nIn --x parts\r\n--", body[4:], end])
    command = [*arguments(tmp_path, liar.url, "PatientID,SeriesNumber", "P7,0"), *liar.login]
    code, done, err = pulled(command)
    assert (code, done["files"], done["left_out"]) == (0, 1, {}), err
    liar.answers["studies"] = (200, {"Warning": '299 pacs: "more"'}, [json.dumps(liar.answers["studies"]).encode()])
    code, done, _ = pulled(command)
    assert (code, done["there"], done["left_out"]) == (1, 1, {"may-be-incomplete": 1})


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 45), st.booleans(), st.booleans(), st.sampled_from([0, 0, 3]), st.booleans(),
    st.sampled_from([10**6, 10, 3]), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_a_list_of_studies_is_whole_or_called_doubtful(n, limits, offsets, shift, moves, cap, warns, seed):
    """It may ignore limits or offsets, repeat some of the page before, move records, and have a most of its own."""
    pytest.importorskip("dicomweb_client", reason="of the extra 'pacs'")
    client, rng = Pacs("http://localhost/web", None, None, None), random.Random(seed)
    there = [record(StudyInstanceUID=f"1.2.{i}") for i in range(n)]

    def search_for_studies(limit, offset, fields):
        records = rng.sample(there, n) if moves else there
        start = max(0, offset - shift) if offsets else 0
        end = start + (min(limit, cap) if limits else n)
        client._warned = warns and end < n
        return records[start:end]

    client._client = SimpleNamespace(search_for_studies=search_for_studies)
    with patch("fedtar_flare.curation.pacs.PAGE", 20):
        listed = client.search("studies", "StudyInstanceUID", [], doubts=(doubts := []))
    assert len({one["StudyInstanceUID"] for one in listed}) == len(listed)
    assert len(listed) == n or [doubt.reason for doubt in doubts] == ["may-be-incomplete"]
    if (limits and offsets and not shift and not moves) or not (limits or offsets or moves):
        assert len(listed) == n and not doubts


@pytest.mark.parametrize(
    ("url", "mode", "column", "word"),
    [("https://localhost/web", 0o640, "PatientID", "chmod 600"), ("http://h/web", 0o600, "PatientID", "https"),
     ("https://me:passw0rd@h/web", 0o600, "PatientID", "password"),
     ("https://localhost/web", 0o600, "PatientName", "PatientName"),
     ("https://localhost/web", 0o600, "Modality", "study")],
)  # fmt: skip
def test_a_query_that_reveals_a_secret_or_asks_for_everything_is_refused(liar, tmp_path, url, mode, column, word):
    liar.files["token"].chmod(mode)
    code, _, err = pulled([*arguments(tmp_path, url, column, "P7"), "--token", liar.files["token"]])
    assert code == 2 and word in err and "passw0rd" not in err
