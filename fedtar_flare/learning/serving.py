"""A drafting service for programs of this machine: a study is posted, the draft of its report comes back.

One request after the other is received and drafted in the main thread, where a timer ends whatever takes too long, a
slow sender as well as a slow draft. Nothing of a request is kept or logged.
"""

import hmac
import re
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.learning.draft_documents import draft_file
from fedtar_flare.learning.drafting import Drafter

KINDS = {"application/dicom": ".dcm", "application/zip": ".zip", "application/gzip": ".nii.gz"}
KINDS |= {"image/png": ".png", "image/jpeg": ".jpg"}
"""Ends of file names by Content-Type of a request."""
FORMS = {"/json": "application/json", "/fhir": "application/fhir+json", "/sr": "application/dicom"}
"""Content-Type of an answer by path."""


class _TooLong(BaseException):
    """The seconds of a request are over; no reader of broken files may take it for their fault."""


def _too_long(*_: object) -> None:
    raise _TooLong


class Service(HTTPServer):
    """Listens on 127.0.0.1; ``serve_forever``, in the main thread, answers until it is interrupted.

    Parameters
    ----------
    drafter : Drafter
        Writes the drafts.
    token : str
        What a request's ``Authorization: Bearer`` must hold.
    port : int
        0 for a free one.

    Raises
    ------
    OSError
        Nothing can listen at the port.
    """

    most_bytes, seconds = 1 << 30, 300.0  # of a request

    def __init__(self, drafter: Drafter, token: str, port: int):
        super().__init__(("127.0.0.1", port), _Handler)
        self.drafter, self.token = drafter, token
        for ends in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(ends) is not signal.SIG_IGN:  # as under nohup
                signal.signal(ends, lambda *_: sys.exit(0))  # so that the folder of a study is deleted
        signal.signal(signal.SIGALRM, _too_long)

    def handle_error(self, *_: object) -> None:
        """Pass over a program that has left."""


class _Handler(BaseHTTPRequestHandler):
    server: Service
    server_version, sys_version, timeout = "fedtar", "", 10.0  # seconds in which a sender may be silent
    error_content_type, error_message_format = "text/plain; charset=utf-8", "%(explain)s\n"

    def handle(self) -> None:
        seconds = self.server.seconds
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again where a library has swallowed the first
        try:
            super().handle()
        except _TooLong:
            self.send_error(408, explain=f"not received and drafted within {seconds:g} s")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def log_message(self, *_: object) -> None:
        """Log nothing of a request."""

    def do_POST(self) -> None:
        """Answer with a draft; what can be refused by its head is not received."""
        given, length = self.headers.get("Authorization", ""), self.headers.get("Content-Length", "")
        if not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {self.server.token}".encode()):
            return self.send_error(401, explain="the header 'Authorization: Bearer TOKEN' is missing or wrong")
        if self.path not in FORMS:
            return self.send_error(404, explain=f"studies are posted to {', '.join(FORMS)}")
        if (kind := self.headers.get("Content-Type", "")) not in KINDS:
            return self.send_error(415, explain=f"Content-Type must be one of {', '.join(KINDS)}")
        if "Transfer-Encoding" in self.headers or not re.fullmatch("[0-9]{1,15}", length):
            return self.send_error(411, explain="the size must be stated: Content-Length, without Transfer-Encoding")
        if int(length) > self.server.most_bytes:
            return self.send_error(413, explain=f"a study has {self.server.most_bytes:,} bytes at most")
        with TemporaryDirectory(prefix="fedtar-serve-") as folder:
            image = Path(folder) / f"study{KINDS[kind]}"
            with image.open("wb") as file:
                while (left := int(length) - file.tell()) and (part := self.rfile.read1(min(left, 1 << 20))):
                    file.write(part)
            if left:
                return self.send_error(400, explain="the study did not arrive whole")
            try:
                body = draft_file(self.server.drafter.draft(image), image, self.path[1:])
            except FedTARError as error:
                return self.send_error(422, explain=str(error).replace(f"{folder}/", ""))
            except Exception as error:  # such as of a full disk, or no memory left
                return self.send_error(500, explain=f"not drafted ({type(error).__name__})")
        self.send_response(200)
        self.send_header("Content-Type", FORMS[self.path])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
