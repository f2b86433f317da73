"""The bill of materials: whole, of the form that CycloneDX prescribes, and true of this environment."""

from __future__ import annotations

import json
import re
from importlib.metadata import requires, version

import pytest
from packaging.requirements import Requirement

from fedtar_flare.cli.main import main
from fedtar_flare.site.sbom import sbom


@pytest.fixture(scope="module")
def bill():
    return sbom()


def test_it_has_the_form_of_cyclonedx(bill):
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", bill["serialNumber"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", bill["metadata"]["timestamp"])
    root = bill["metadata"]["component"]
    assert root["type"] == "application" and root["name"] == "fedtar-flare"
    every = [root, *bill["components"]]
    assert len({entry["bom-ref"] for entry in every}) == len(every) > 50
    for entry in every:
        assert entry["purl"].startswith(f"pkg:pypi/{entry['name']}@") and entry["version"]
        for licence in entry.get("licenses", []):
            (kind,) = licence
            assert licence["expression"] if kind == "expression" else licence["license"]["name"]
    known = {entry["bom-ref"] for entry in every}
    assert {entry["ref"] for entry in bill["dependencies"]} == known
    assert all(set(entry["dependsOn"]) <= known for entry in bill["dependencies"])


def test_every_requirement_is_in_it_as_installed_and_reached_from_the_root(bill):
    found = {entry["name"]: entry["version"] for entry in bill["components"]}
    for text in requires("fedtar_flare"):
        requirement = Requirement(text)
        if requirement.marker is None:
            assert found[requirement.name.lower().replace("_", "-")] == version(requirement.name)
    edges = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    seen, open_ = set(), [bill["metadata"]["component"]["bom-ref"]]
    while open_:
        if (ref := open_.pop()) not in seen:
            seen.add(ref)
            open_ += edges[ref]
    assert seen == set(edges)


def test_the_command_writes_it(tmp_path, capsys):
    assert main(["sbom", "-o", str(tmp_path / "sbom.json")]) == 0 and capsys.readouterr().out == ""
    assert json.loads((tmp_path / "sbom.json").read_text())["bomFormat"] == "CycloneDX"
