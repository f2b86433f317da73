"""What is installed here, as a software bill of materials in the form of CycloneDX 1.5 (JSON)."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement

ROOT = "fedtar_flare"


def sbom() -> dict[str, Any]:
    """This package and all that it needs, as installed: name, version, licence and dependencies of each.

    Extras count where they are installed. Raises importlib's PackageNotFoundError if this package itself is not.
    """
    found: dict[str, Distribution] = {}
    edges: dict[str, list[str]] = {}
    _visit(distribution(ROOT), found, edges)
    root = _name(ROOT)
    components = [_component(name, found[name], "library") for name in sorted(found) if name != root]
    refs = {name: _purl(name, found[name].version) for name in found}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "component": _component(root, found[root], "application"),
        },
        "components": components,
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[one] for one in edges[name])} for name in sorted(found)
        ],
    }


def _visit(package: Distribution, found: dict[str, Distribution], edges: dict[str, list[str]]) -> None:
    name = _name(package.metadata["Name"])
    found[name], edges[name] = package, []
    for needed in _needed(package):
        other = _name(needed.metadata["Name"])
        if other != name and other not in edges[name]:
            edges[name].append(other)
        if other not in found:
            _visit(needed, found, edges)


def _needed(package: Distribution) -> Iterator[Distribution]:
    """Installed distributions that a package requires, those of its extras among them."""
    extras = ["", *(package.metadata.get_all("Provides-Extra") or ())]
    for text in package.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            yield distribution(requirement.name)
        except PackageNotFoundError:  # an extra that is not installed, or what the doctor reports
            continue


def _component(name: str, package: Distribution, kind: str) -> dict[str, Any]:
    purl = _purl(name, package.version)
    entry: dict[str, Any] = {"type": kind, "bom-ref": purl, "name": name, "version": package.version, "purl": purl}
    if licence := _licence(package.metadata):
        entry["licenses"] = [licence]
    return entry


def _licence(metadata: Any) -> dict[str, Any] | None:
    """The licence expression where there is one, else its classifier, else the first line of its name."""
    if expression := metadata.get("License-Expression"):
        return {"expression": str(expression)}
    named = str(metadata.get("License") or "").strip().splitlines()
    classifiers = metadata.get_all("Classifier") or ()
    classified = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License :: ")]
    name = next((text for text in (*classified, *named) if text and text != "UNKNOWN"), "")
    return {"license": {"name": name[:200]}} if name else None


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
