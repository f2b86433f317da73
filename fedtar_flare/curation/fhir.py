"""DiagnosticReports of FHIR R4, from Bundles and single resources (``.json``) and bulk exports (``.ndjson``)."""

import base64
import codecs
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import DataError, collecting, decoding, within
from fedtar_flare.core.files import MOST_BYTES, open_regular, read_bytes, unique
from fedtar_flare.curation.documents import (
    FINAL,
    IMAGING,
    NOBODY,
    UNKNOWN,
    WITHDRAWN,
    Document,
    Identifier,
    moment,
    studies_of,
    understood,
)

STATUS = dict.fromkeys(("final", "amended", "corrected", "appended"), FINAL)
STATUS |= dict.fromkeys(("cancelled", "entered-in-error"), WITHDRAWN)
SECTIONS = IMAGING | {"LP29684-5", "18748-4", "18726-0", "394914008", "363679005"}  # LOINC's and SNOMED's radiology
OF_ORDER = {"ACSN", "PLAC", "FILL"}  # types of identifiers that several reports may share
FORMS = {"application/pdf": "is-pdf", "text/html": "is-html", "application/xhtml+xml": "is-html", "text/rtf": "is-rtf",
         "application/rtf": "is-rtf", "text/xml": "is-xml", "application/xml": "is-xml"}  # fmt: skip
URL = re.compile(r"(https?://.+)/([A-Z][A-Za-z]+)/([A-Za-z0-9.-]{1,64})")
CHARSETS = re.compile(r"ascii|utf-(8|16)|iso8859-\d+|cp125\d|gb\w+|big5|euc_\w+|shift_jis|iso2022_\w+|koi8-r")


@dataclass
class _Entry:
    """A resource where it stands: ``names`` are its URLs, ``root`` begins those that it names relatively."""

    origin: str
    names: tuple[str, ...]
    root: str
    scope: str  # the Bundle, or the folder of an export
    content: dict[str, Any]

    @property
    def identifiers(self) -> list[tuple[Identifier, set[str]]]:
        """Identifiers in use, with their types."""
        used = [i for i in self.content.get("identifier", ()) if i.get("value") and i.get("use") != "old"]
        known = [Identifier(str.strip(i["value"]), str.strip(i.get("system", ""))) for i in used]
        return [(k, {code for _, code in _codes(i.get("type", {}))}) for k, i in zip(known, used, strict=True)]

    @property
    def orders(self) -> list[Identifier]:
        return [known for known, types in self.identifiers if "ACSN" in types]

    @property
    def uids(self) -> list[str]:
        return [i.value.removeprefix("urn:oid:") for i, _ in self.identifiers if i.issuer == "urn:dicom:uid"]


def _codes(concept: dict[str, Any]) -> set[tuple[str, str]]:
    return {(code.get("system", ""), code.get("code", "")) for code in concept.get("coding", ())}


@dataclass
class _Files:
    """What FHIR files hold. The same relative id in two Bundles, or in two folders of exports, stays two."""

    problems: list[DataError]
    reports: list[_Entry] = field(default_factory=list)
    entries: dict[str, list[_Entry]] = field(default_factory=lambda: defaultdict(list))  # by URL
    next: dict[str, str] = field(default_factory=dict)  # the file that goes on at a URL
    pages: set[str] = field(default_factory=set)  # URLs of the pages that are among the files
    read: int = 0  # resources that matter for a report

    def read_file(self, file: Path) -> None:
        before = self.read + len(self.problems)
        folder = str(file.parent.parent if file.parent.name == "deleted" else file.parent)
        by_line = file.suffix.lower() == ".ndjson"
        with open_regular(file) as opened:
            contents = iter(partial(opened.readline, MOST_BYTES), b"") if by_line else [read_bytes(file)]
            for n, content in enumerate(contents, 1):
                where = f"{file}, line {n}" if by_line else str(file)
                with collecting(self.problems), within(where), decoding("cannot be read"):
                    if content.strip():
                        item = json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique)
                        self._read_item(where, folder, item)
        if self.read + len(self.problems) == before:
            raise DataError("no report, patient, order or study in it", reason="no-report")

    def _read_item(self, where: str, folder: str, item: dict[str, Any]) -> None:
        if not isinstance(item, dict) or "resourceType" not in item:
            raise DataError("no resource of FHIR, which has a resourceType", reason="no-report")
        bundle = item["resourceType"] == "Bundle"
        links = {link["relation"]: link["url"] for link in item.get("link", ()) if bundle}
        self.pages.add(links.pop("self", ""))
        self.next |= {url: where for relation, url in links.items() if relation == "next"}
        for n, entry in enumerate(item.get("entry", ()) if bundle else [{"resource": item}], 1):
            place = f"{where}, entry {n}" if bundle else where
            with collecting(self.problems), within(place), decoding("cannot be read"):
                self._read_entry(place, folder, where if bundle else folder, entry)

    def _read_entry(self, place: str, folder: str, scope: str, entry: dict[str, Any]) -> None:
        content, request = entry.get("resource") or {}, entry.get("request", {})
        deleted = request.get("method") == "DELETE"
        local = f"{content['resourceType']}/{content['id']}" if "id" in content else ""
        local = request.get("url", "").split("/_history/")[0] if deleted else local
        url = (entry.get("fullUrl") or (local if deleted else "")).split("/_history/")[0]
        served = URL.fullmatch(url)
        kind = content.get("resourceType") or (served[2] if served else local.split("/")[0])
        if kind == "Bundle":
            raise DataError("a Bundle within a Bundle is not read", reason="bundle-in-bundle")
        if kind == "DocumentReference":
            raise DataError("only DiagnosticReports are read", reason="other-document")
        if "?" in kind:
            raise DataError("it is not certain what was deleted", reason="unclear-deletion")
        if served and local and not deleted and not url.endswith(f"/{local}"):
            raise DataError(f"fullUrl is of another resource than {local}", reason="bad-full-url")
        if deleted:
            meta = {"lastUpdated": entry.get("response", {}).get("lastModified", "")}
            content = {"resourceType": "deleted", "status": "entered-in-error", "meta": meta}
        scopes = [scope, folder] if deleted else [scope]  # an export's deletions are Bundles
        names = [f"{part}/{local}" for part in scopes if local] + [f"{scope} {url}"] * bool(url)
        root, own = (served[1], [url]) if served else (scope, names or [place])
        known = _Entry(f"{place}, {local}" if local else place, tuple(own), root, scope, content)
        if kind in ("DiagnosticReport", "Patient", "ServiceRequest", "ImagingStudy"):
            for name in {*names, *own}:
                self.entries[name].append(known)
            self.read += 1
        if kind == "DiagnosticReport":
            self.reports.append(known)

    def resolved(self, entry: _Entry, field: str, kind: str) -> list[_Entry]:
        """The versions of what a resource refers to; else what the reference itself says of it."""
        references = entry.content.get(field, [])
        references = [references] if isinstance(references, dict) else references
        return [version for reference in references for version in self._resolved(entry, reference, kind)]

    def _resolved(self, entry: _Entry, reference: dict[str, Any], kind: str) -> list[_Entry]:
        name = reference.get("reference", "").split("/_history/")[0]
        if name.startswith("#"):
            inside = [item for item in entry.content.get("contained", ()) if f"#{item['id']}" == name]
            return [replace(entry, content=item) for item in inside]
        absolute = name if URL.fullmatch(name) else f"{entry.scope} {name}" if ":" in name else f"{entry.root}/{name}"
        kind = reference.get("type") or (name.split("/")[-2] if "/" in name else kind)
        stated = {"resourceType": kind, "identifier": [reference.get("identifier", {})]}
        versions = self.entries.get(absolute) or [replace(entry, content=stated)]
        if any(version.content["resourceType"] == "deleted" for version in versions):
            raise DataError(f"{kind} was deleted", reason="deleted-resource")
        return versions

    def patients(self, entry: _Entry) -> set[Identifier]:
        """Every identifier that may be the one by which a resource's patient is known."""
        owners = self.resolved(entry, "subject", "Patient")
        if any(owner.content["resourceType"] != "Patient" for owner in owners):
            raise DataError("its subject is no patient", reason="no-patient-id")
        every = [owner.identifiers for owner in owners]
        return {known for own in every for known, _ in [i for i in own if "MR" in i[1]] or own}


def read_fhir(paths: Iterable[Path], problems: list[DataError]) -> Iterator[Document]:
    """The reports of FHIR files, whose resources refer to each other."""
    files = _Files(problems)
    for path in paths:
        with collecting(problems), within(str(path)), decoding("cannot be read"):
            files.read_file(path)
    for where in (where for url, where in files.next.items() if url not in files.pages):
        problems.append(DataError(f"{where}: the page that follows is not among the files", reason="missing-page"))
    for entry in files.reports:
        names = frozenset(("fhir", name) for name in entry.names)
        status = str(entry.content.get("status"))
        document = Document(origin=entry.origin, names=names, status=STATUS.get(status, status), issued="")
        document = understood(document, partial(_version, entry, names))
        yield document if document.unread else understood(document, partial(_about, entry, files, document))


def _version(entry: _Entry, names: frozenset[tuple[str, ...]]) -> dict[str, Any]:
    """Which version of which report it is, even where nothing else of it can be read."""
    content, meta = entry.content, entry.content.get("meta", {})
    own = [known for known, types in entry.identifiers if known.issuer and not types & OF_ORDER]
    codes = tuple(sorted(map("|".join, _codes(content.get("code", {})))))
    number = meta.get("versionId", "")
    clocks = {"updated": moment(meta.get("lastUpdated", "")), "version": number.zfill(20) if number.isdecimal() else ""}
    return {
        "names": names | {("fhir", *identifier, *codes) for identifier in own},
        "procedure": " ".join(codes) or UNKNOWN,
        "issued": moment(content.get("issued", "")),
        "clocks": tuple((f"{name} {entry.names[0]}", time) for name, time in clocks.items()),
    }


def _about(entry: _Entry, files: _Files, document: Document) -> dict[str, Any]:
    """Whose report it is, about which study, and its text."""
    report = entry.content
    images = files.resolved(entry, "imagingStudy", "ImagingStudy")
    requests = files.resolved(entry, "basedOn", "ServiceRequest")
    pairs = [(order, "") for item in (entry, *requests) for order in item.orders]
    pairs += [(order, uid) for item in images for order in item.orders or [NOBODY] for uid in item.uids or [""]]
    numbers = {order.value for order, _ in pairs} - {""}
    if entry.orders and numbers > {order.value for order in entry.orders}:
        raise DataError("its order or study has another accession number", reason="several-studies")
    about = studies_of(pairs) | {
        "names": frozenset(name for name in document.names if len(name) == 2 or name[1] not in numbers),
        "patients": tuple(set.union(*map(files.patients, (entry, *requests, *images)))),
    }
    sections = {code for category in report.get("category", ()) for _, code in _codes(category)}
    if sections and not sections & SECTIONS:
        return about | {"unread": "other-section"}
    if any(tag.get("code") == "SUBSETTED" for tag in report.get("meta", {}).get("tag", ())):
        return about | {"unread": "subsetted"}
    if report.get("modifierExtension") or report.get("implicitRules"):
        return about | {"unread": "modifier-extension"}
    return about if document.status == WITHDRAWN else about | _text(report)


def _text(report: dict[str, Any]) -> dict[str, Any]:
    """The whole report. FHIR has all its forms say the same; where they do not, none is certain."""
    forms = [(f.get("contentType", "").split(";")[0].strip().lower(), moment(f.get("creation", "")), f)
             for f in report.get("presentedForm", ())]  # fmt: skip
    if not forms:
        if report.get("result"):
            raise DataError("its text is in Observations", reason="text-in-observations")
        return {"text": str.strip(report.get("conclusion", ""))}
    plain = [form for form in forms if form[0] == "text/plain" and "data" in form[2]]
    if not plain:
        reasons = {FORMS.get(kind, "other-form") for kind, _, _ in forms}
        raise DataError("no form of it is plain text", reason=min(reasons))
    if len(languages := {form.get("language") for _, _, form in plain}) > 1:
        if not (language := report.get("language")) or language not in languages:
            raise DataError("it is in several languages, and does not say which is its own", reason="several-languages")
        plain, forms = ([f for f in some if f[2].get("language", language) == language] for some in (plain, forms))
    current = [form for _, created, form in plain if not any(time > f"{created}~" for _, time, _ in forms)]
    if not current:
        raise DataError("its newest form is no plain text", reason="newer-form")
    texts = {_decoded(form) for form in current}
    if len({text.strip() for text in texts}) > 1:
        raise DataError("its forms differ", reason="several-texts")
    return {"text": min(texts), "attached": len(report["presentedForm"]) - len(current)}


def _decoded(form: dict[str, Any]) -> str:
    raw = base64.b64decode(re.sub(r"\s", "", form["data"]), validate=True)
    stated = re.search(r';\s*charset\s*=\s*"?([^\s";]+)', form["contentType"], re.IGNORECASE)
    with decoding("its text is not in the character set that is stated", "bad-charset"):
        codec = codecs.lookup(stated[1]).name if stated else "utf-8"
        text = raw.decode("utf-8-sig" if codec == "utf-8" else codec)
        alike = not raw.isascii() and codec.startswith(("iso8859", "cp125")) and raw.decode(errors="ignore").encode()
        if not CHARSETS.fullmatch(codec) or alike == raw:
            raise UnicodeError(f"it seems not to be {codec}")
        return text
