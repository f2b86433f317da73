"""Reports as the documents of four standards, to be told apart by their patient, study and order."""

from __future__ import annotations

import base64
import json
from typing import Any

TEXT = "Größere Ergüsse bds.\n- Neu: Knoten 3 mm."
Resource = dict[str, Any]


def acsn(number: str, system: str = "urn:ris") -> Resource:
    return {"type": {"coding": [{"code": "ACSN"}]}, "system": system, "value": number}


def form(text: str | bytes, kind: str = "text/plain; charset=UTF-8", **more: Any) -> Resource:
    raw = text if isinstance(text, bytes) else text.encode()
    return {"contentType": kind, "data": base64.b64encode(raw).decode(), **more}


def report(number: str = "A1", text: str = TEXT, **more: Any) -> Resource:
    """A DiagnosticReport; a field that is given as None is left out."""
    content = {"resourceType": "DiagnosticReport", "id": number, "status": "final", "issued": "2024-01-31T12:00:00Z",
               "subject": {"reference": "Patient/1"}, "identifier": [acsn(number)],
               "presentedForm": [form(text)]}  # fmt: skip
    return {name: value for name, value in (content | more).items() if value is not None}


def patient(mrn: str = "P1", number: str = "1", system: str = "urn:mrn") -> Resource:
    own = {"type": {"coding": [{"code": "MR"}]}, "system": system, "value": mrn}
    return {"resourceType": "Patient", "id": number, "identifier": [own, {"system": "urn:insurance", "value": "9"}]}


def bundle(*resources: Resource, root: str = "", **more: Any) -> str:
    """A Bundle, of a server's resources where it has a ``root``."""
    entries = [
        item if "resource" in item or "request" in item else {"resource": item}
        | ({"fullUrl": f"{root}/{item['resourceType']}/{item['id']}"} if root else {})
        for item in resources
    ]  # fmt: skip
    return json.dumps({"resourceType": "Bundle", "type": "collection", "entry": entries} | more)


def lines(*resources: Resource) -> str:
    return "\n".join(map(json.dumps, resources))


def deletion(number: str) -> Resource:
    return {"request": {"method": "DELETE", "url": f"DiagnosticReport/{number}"}}
