"""A drafting service, as programs of the machine use it, and as some misuse it."""

import json
import shutil
import signal
import socket
import time
import zipfile
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from io import BytesIO
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from command import failing, fedtar_here
from make_dicom import put, slice_dataset
from pydicom import dcmread

from fedtar_flare.core.errors import DataError
from fedtar_flare.imaging.readers.dicom_files import headers
from fedtar_flare.learning import drafting, serving
from fedtar_flare.learning.drafting import Draft
from fedtar_flare.models.adapters import hub
from fedtar_flare.site import release

TOKEN, MOST = "t" * 16, 2_000_000


class Drafter:
    """Drafts every DICOM study; of other files it is never done, and takes each exception for their fault."""

    swallows = Exception  # as a reader of broken files

    def __init__(self, *_, **__):
        self.images = []

    def draft(self, image):
        self.images.append(image)
        while not next(headers(image), None):
            try:
                time.sleep(0.01)
            except self.swallows:
                self.swallows = Exception
        return Draft("Clear.", "run", 1, "model", False, created="2024-01-31T12:00:00Z")


@pytest.fixture(autouse=True)
def _handlers():
    """A service changes those of this process."""
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the service leaves it ignored
    yield
    for kind, handler in handlers.items():
        signal.signal(kind, handler)


@pytest.fixture
def service():
    """A service with a low limit of bytes."""
    service = serving.Service(Drafter(), TOKEN, 0)
    service.most_bytes = MOST
    yield service
    service.server_close()


def answers(service, *requests):
    """What each request gets; the service has the main thread meanwhile, as it needs it."""
    got = []

    def ask():
        try:
            got.extend(request(service.server_port) for request in requests)
        finally:
            service.shutdown()

    Thread(target=ask).start()
    service.serve_forever()
    return got


def posting(body=b"", path="/json", **changes):
    """A request that gets status, Content-Type and body; a header that is None is left out."""
    given = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/zip"}
    given |= {name.replace("_", "-"): value for name, value in changes.items()}

    def request(port):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", path, body, {name: value for name, value in given.items() if value})
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read()

    return request


def saying(text, waits=True):
    """A request that says a text, and then nothing, until it is answered or ended; or of a program that ends there."""

    def request(port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(text.encode())
            return waits and connection.makefile("rb").read()

    return request


@pytest.fixture
def study(tmp_path):
    """A zip of one slice."""
    put(StudyDate="20240131", PatientID="P7")(ds := slice_dataset(np.zeros((8, 8)), 0))
    (folder := tmp_path / "study").mkdir()
    ds.save_as(folder / "1.dcm", enforce_file_format=True)
    return Path(shutil.make_archive(str(tmp_path / "packed"), "zip", folder)).read_bytes()


def test_a_study_is_drafted_in_each_form_and_is_not_kept(service, study):
    got = answers(service, *(posting(study, path) for path in serving.FORMS))
    (one, as_json, text), (two, as_fhir, report), (three, as_sr, file) = got
    assert (one, as_json, json.loads(text)["text"]) == (200, "application/json", "Clear.")
    assert (two, as_fhir, json.loads(report)["subject"]["identifier"]["value"]) == (200, "application/fhir+json", "P7")
    assert (three, as_sr, dcmread(BytesIO(file)).PatientID) == (200, "application/dicom", "P7")
    assert len(service.drafter.images) == 3 and not any(image.parent.exists() for image in service.drafter.images)


REFUSED = {
    401: [{"Authorization": None}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \xe9"}],
    404: [{"path": "/../../etc/passwd"}, {"path": "/json?image=/etc/passwd"}],
    415: [{"Content_Type": "text/html"}, {"Content_Type": None}],
    411: [{"Transfer_Encoding": "chunked"}, {"Content_Length": "-1"}, {"Content_Length": "1_0"}],
    413: [{"Content_Length": str(MOST + 1)}, {"Content_Length": "9" * 15}],
}


def test_a_request_that_cannot_be_right_is_refused_before_its_body(service):
    expected, requests = zip(*((s, posting(**one)) for s, wrong in REFUSED.items() for one in wrong), strict=True)
    got = answers(service, *requests)
    assert tuple(status for status, *_ in got) == expected
    assert all(kind.startswith("text/plain") and text for _, kind, text in got) and not service.drafter.images


def test_studies_that_are_none_are_refused_and_write_nothing(service, tmp_path):
    with zipfile.ZipFile(tmp_path / "made.zip", "w") as archive:
        archive.writestr("../../escaped.dcm", b"x" * 200)
    images = []

    def draft(image):
        images.append(image)
        raise DataError(f"not a readable zip, or {len([*headers(image)])} studies")

    service.drafter.draft = draft
    bodies = [b"", b"PK\3\4 no zip", (tmp_path / "made.zip").read_bytes()]
    *got, (status, _, text) = answers(service, *map(posting, bodies))
    assert [status for status, *_ in got] == [422, 422]
    assert all(b"study.zip: not a readable zip" in text and b"fedtar-serve" not in text for *_, text in got)
    assert status == 422 and b"0 studies" in text and not [*images[-1].parent.parent.glob("escaped*")]


def test_a_draft_that_fails_is_answered_without_a_word_of_the_study(service, study, monkeypatch):
    monkeypatch.setattr(service.drafter, "draft", lambda image: 1 / 0)
    ((status, _, text),) = answers(service, posting(study))
    assert (status, text) == (500, b"not drafted (ZeroDivisionError)\n")


HEAD = f"POST /json HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/zip\r\nContent-Length: 9\r\n"


def suppressed(request, port):
    """A request whose answer nobody waits for."""
    with suppress(OSError, HTTPException):
        request(port)


def test_slow_and_silent_senders_and_drafts_without_end_are_ended(service, study):
    service.seconds, endless = 1.0, posting(b"x" * 9, Content_Type="image/png")
    slow, silent, (status, *_) = answers(service, saying(f"{HEAD}\r\nPK"), saying("POST"), endless)
    assert b" 408 " in slow and b"within 1 s" in slow and silent == b"" and status == 408
    service.drafter.swallows = BaseException  # as Python does of what is raised in a callback
    assert answers(service, endless)[0][0] == 408
    service.seconds = 60
    assert answers(service, saying(f"{HEAD}\r\nPK", waits=False), posting(study))[1][0] == 200


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP])
def test_a_service_that_is_ended_or_whose_terminal_is_closed_leaves_no_study(service, monkeypatch, ends):
    monkeypatch.setattr(service.drafter, "draft", lambda image: (images.append(image), signal.raise_signal(ends)))
    images, sender = [], Thread(target=suppressed, args=(posting(b"x" * 9), service.server_port))
    sender.start()
    with pytest.raises(SystemExit):
        service.serve_forever()
    sender.join()
    assert not images[0].parent.exists()


def test_the_command_needs_a_token_and_says_where_it_listens(tmp_path, monkeypatch):
    assert "FEDTAR_TOKEN" in failing("serve", tmp_path, FEDTAR_TOKEN="short")
    monkeypatch.setattr(drafting, "Drafter", Drafter)
    monkeypatch.setattr(serving.Service, "serve_forever", lambda service: service.server_close())
    code, out, err = fedtar_here("serve", tmp_path, "--port", "0", FEDTAR_TOKEN=TOKEN)
    assert (code, out) == (0, "") and err.startswith("http://127.0.0.1:")
    (tmp_path / hub.MANIFEST).write_text("{}")
    assert "--root" in failing("serve", tmp_path, FEDTAR_TOKEN=TOKEN) and release.MANIFEST == hub.MANIFEST
    assert "nothing can listen there" in failing("serve", tmp_path / "x", "--port", "99999", FEDTAR_TOKEN=TOKEN)
