"""A PACS by DICOMweb, through dicomweb-client. The size of its answers is bounded, and they are never logged."""

import io
import logging
import re
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from requests import JSONDecodeError, RequestException, Session
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from fedtar_flare.core.errors import ConfigError, DataError, FedTARError
from fedtar_flare.core.files import read_bytes
from fedtar_flare.imaging.limits import current

ANSWER_BYTES, CHUNK, REQUEST = 64 << 20, 1 << 18, 1 << 16  # of an answer, read at a time, that a request counts as
PAGE, MOST, VALUE = 200, 100_000, 1024  # records of a page, studies or instances of an answer, letters of a value
SECONDS = 300.0  # for an answer's head with its repetitions, and for each chunk
PASSES = 10  # through all pages of an answer whose order is not stable
BUSY, REFUSED = (429, 502, 503, 504), (401, 403)
Record = dict[str, str]  # values by keyword; several are separated by backslashes


def is_uid(text: str) -> bool:
    """Whether a text is a UID, and so no path."""
    return len(text) <= 64 and re.fullmatch(r"[0-9]+(\.[0-9]+)*", text) is not None


@contextmanager
def _in_time() -> Iterator[None]:
    """End (TimeoutError) what takes longer than :data:`SECONDS`: requests' own timeout begins anew at each byte."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)  # again and again, as urllib3 tries again
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Adapter(HTTPAdapter):
    def send(self, *arguments: Any, **named: Any) -> Any:
        with _in_time():
            return super().send(*arguments, **named)


class Pacs:
    """A client of one DICOMweb service, of at most ``rate`` megabytes a second, that follows no redirect.

    ``token``, ``cert`` and ``ca`` are files: a bearer token (or ``Basic ...``), the client's certificate and key (PEM;
    only their owner may read these two), and certificates to trust in place of the public ones. A bad answer is a
    DataError; a FedTARError says that it makes no sense to go on.
    """

    def __init__(self, url: str, token: Path | None, cert: Path | None, ca: Path | None, rate: float = 20.0):
        try:
            from dicomweb_client.web import DICOMwebClient
        except ImportError as error:
            raise ConfigError("dicomweb-client is not installed: pip install 'fedtar_flare[pacs]'") from error
        where = urlsplit(url)
        if where.scheme not in ("http", "https") or not where.hostname or "@" in where.netloc or rate <= 0:
            raise ConfigError("needs http(s)://HOST[:PORT]/PATH without a password in it, and a rate above 0")
        if token and where.scheme == "http" and where.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise ConfigError(f"{where.netloc}: a token is sent over https:// alone")
        self.host, self._rate, self._free, self._left, self._end = where.netloc, rate * 1e6, 0.0, ANSWER_BYTES, b""
        self._token = read_bytes(Path(_private(token)), REQUEST).decode("utf-8", "replace").strip() if token else ""
        if token and not re.fullmatch(r"((Bearer|Basic) )?[\w.~+/=-]+", self._token, re.ASCII):
            raise ConfigError(f"{token}: no bearer token in one line (nor 'Basic' and what follows it)")
        for name in ("dicomweb_client", "urllib3", "pydicom"):  # their messages quote queries and values
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        session, get = Session(), ["GET"]
        retry: dict[str, Any] = {"allowed_methods": get, "status_forcelist": BUSY, "backoff_factor": 0.5}
        again = _Adapter(max_retries=Retry(4, respect_retry_after_header=False, **retry))
        session.mount(f"{where.scheme}://", again)
        session.trust_env = False  # no .netrc, no proxy, no certificates of the environment
        session.headers["Accept-Encoding"], session.auth = "identity", self._prepared
        session.cert, session.verify = _private(cert) if cert else None, _private(ca, 0) if ca else True
        options: dict[str, Any] = {"chunk_size": CHUNK, "permissive_uid": True, "timeout": 60}
        self._client = DICOMwebClient(url.rstrip("/"), session, callback=self._bounded, **options)
        self._client.set_http_retry_params(retry=False)

    def search(
        self, level: str, key: str, fields: Sequence[str], most: int = MOST, doubts: list[DataError] | None = None,
        **of: Any,
    ) -> list[Record]:  # fmt: skip
        """List what the PACS has (QIDO-RS), all pages again until that brings nothing new.

        That some may be missing is raised, or appended to ``doubts``.
        """

        def page(limit: int, offset: int) -> tuple[int, dict[str, Record]]:
            with self._request():
                self._left, self._warned, ask = ANSWER_BYTES, False, getattr(self._client, f"search_for_{level}")
                items = ask(limit=limit, offset=offset, fields=list(fields), **of)
                records = {_value(item, key): {name: _value(item, name) for name in (key, *fields)} for item in items}
            if not all(map(is_uid, records)):
                raise DataError(f"{self.host} answers with a {key} that is no UID", reason="bad-uid")
            return len(items), records

        listed: dict[str, Record] = {}
        grown, passes, certain = True, 0, False
        while grown and passes < PASSES and not certain:
            count, warned, seen, (size, new) = 0, False, dict[str, Record](), page(PAGE, 0)
            while not new.keys() <= seen.keys():
                count, warned, seen = count + size, self._warned, seen | new
                if len(listed | seen) > most:
                    text = f"{self.host} answers with more than {most}; ask for less at a time"
                    raise DataError(text, reason="too-many")
                size, new = page(PAGE, count)
            grown, listed, passes = not seen.keys() <= listed.keys(), listed | seen, passes + 1
            # one that ignores offsets has told all if it ignores limits, too
            certain = count == len(listed) and not warned and (not new or page(1, 0)[1].keys() == listed.keys())
        if not certain:
            text = f"{self.host} lists {len(listed)} {level} by pages that repeat, move or are not all"
            doubt = DataError(f"{text}: some may be missing; ask for less at a time", reason="may-be-incomplete")
            if doubts is None:
                raise doubt
            doubts.append(doubt)
        return list(listed.values())

    def series(self, study: str, series: str) -> Iterator[tuple[Any, bytes]]:
        """Get the instances of a series (WADO-RS), compressed as the PACS stores them."""
        with self._request():
            self._left, as_stored = current().file_bytes, (("application/dicom", "*"),)
            for dataset in self._client.iter_series(study, series, media_types=as_stored):
                dataset.save_as(file := io.BytesIO(), enforce_file_format=True)
                yield dataset, file.getvalue()
                self._left = current().file_bytes
            if not self._end.rstrip().endswith(b"--"):
                raise DataError(f"{self.host} broke off within a series", reason="bad-answer")

    def store(self, dataset: Any) -> bool:
        """Store one instance with its study (STOW-RS), never over another."""
        study, sop = dataset.StudyInstanceUID, dataset.SOPInstanceUID
        filters = {"StudyInstanceUID": study}
        matches = self.search("studies", "StudyInstanceUID", ["PatientID"], 1, search_filters=filters)
        if matches != [filters | {"PatientID": dataset.PatientID}]:
            raise DataError(f"{self.host} has no such study of this patient; nothing was sent", reason="no-study")
        stored = self.search("instances", "SOPInstanceUID", [], study_instance_uid=study)
        if {"SOPInstanceUID": sop} in stored:
            return False
        dataset.preamble, self._left = b"\0" * 128, ANSWER_BYTES
        with self._request():
            answer = self._client.store_instances([dataset], study)
            confirmed = [item.ReferencedSOPInstanceUID for item in answer.get("ReferencedSOPSequence") or ()]
        if sop not in confirmed:
            raise DataError(f"{self.host} did not store the draft", reason="not-stored")
        return True

    def _prepared(self, request: Any) -> Any:
        self._wait(REQUEST)
        request.url = request.url.replace("%2A", "*").replace("%3F", "?")  # which Orthanc 1.10 does not decode
        if self._token:
            request.headers["Authorization"] = self._token if " " in self._token else f"Bearer {self._token}"
        return request

    def _wait(self, count: int) -> None:
        now = time.monotonic()
        time.sleep(max(0.0, self._free - now))
        self._free = max(now, self._free) + count / self._rate

    def _bounded(self, response: Any, **_: Any) -> Any:
        """Bound the speed and size of an answer; refuse a redirect."""
        if response.is_redirect:
            to = urlsplit(response.headers["location"])
            text = f"{self.host} sends the request on to {to.scheme}://{to.netloc}, which is not followed"
            raise FedTARError(f"{text}; if that is right, name that address")
        self._warned = "299" in response.headers.get("Warning", "")
        unbounded = response.iter_content
        boundary = re.search(r'(?i)boundary="?([^";]+)', response.headers.get("Content-Type", ""))
        start = re.compile(rb"(?:\A|\r\n)--" + re.escape(boundary[1].encode())) if boundary else None

        def iter_content(chunk_size: int = CHUNK, **options: Any) -> Iterator[bytes]:
            preamble, before = b"", start  # what stands before the first part is for programs that know no parts
            chunks = unbounded(min(chunk_size, CHUNK), **options)
            while True:
                with _in_time():
                    chunk = next(chunks, b"")
                if not chunk:
                    return
                self._left, self._end = self._left - len(chunk), (self._end + chunk)[-9:]
                if self._left < 0:
                    response.close()
                    raise DataError(f"{self.host} sends more than a file or an answer may have", reason="too-large")
                self._wait(len(chunk))
                if before:
                    preamble += chunk
                    if not (first := before.search(preamble)) and len(preamble) < CHUNK:
                        continue
                    chunk, before = preamble[first.start() if first else 0 :], None
                yield chunk

        response.iter_content = iter_content
        return response

    @contextmanager
    def _request(self) -> Iterator[None]:
        """Replace the libraries' errors, whose texts hold queries and values, by errors with advice."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except (FedTARError, MemoryError):
            raise
        except Exception as error:
            kind, code = type(error).__name__, getattr(getattr(error, "response", None), "status_code", 0)
            if isinstance(error, JSONDecodeError) or not isinstance(error, RequestException):
                text = f"{self.host} answers with something that is not DICOMweb ({kind})"
                raise DataError(text, reason="bad-answer") from None
            if code and code not in BUSY + REFUSED:
                raise DataError(f"{self.host} answers with HTTP {code}", reason=f"http-{code}") from None
            text = f"{self.host} does not answer, or refuses ({f'HTTP {code}' if code else kind}): look at address,"
            raise FedTARError(f"{text} network, token and certificates; the same command goes on later") from None


def _private(path: Path, forbidden: int = 0o077) -> str:
    if not path.is_file() or path.stat().st_mode & forbidden:
        text = "holds a secret and can be read by others: chmod 600" if path.is_file() else "there is no such file:"
        raise ConfigError(f"{path}: {text} {path}")
    return str(path)


def _value(record: Any, keyword: str) -> str:
    from pydicom.datadict import tag_for_keyword

    values = record.get(f"{tag_for_keyword(keyword):08X}", {}).get("Value") or []
    return "\\".join("" if value is None else str(value) for value in values)[:VALUE].strip(" \0")
