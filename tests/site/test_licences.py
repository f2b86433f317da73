"""Licences of all that an installation brings: no copyleft among the mandatory dependencies, and none unknown."""

import re
import tomllib
from importlib.metadata import distribution

from packaging.requirements import Requirement

COPYLEFT = re.compile(r"\b[AL]?GPL|GNU|Affero|\bSSPL|\bEUPL|\bCC-BY-(NC|SA)", re.IGNORECASE)
OF_NVIDIA = ("cuda-", "nvidia-")
"""Come with torch on Linux; some say no licence in their metadata (NVIDIA's own, no copyleft)."""


def licence(metadata):
    """The licence expression where there is one, else the classifiers, else the first line of its name."""
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classified = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    named = str(metadata.get("License") or "").strip().splitlines()
    return "; ".join(classified) or next((line for line in named if line != "UNKNOWN"), "")


def mandatory(project):
    """Metadata of everything that an installation without extras brings, by name; not installed, it raises."""
    metadata, open_ = {}, [Requirement(text) for text in tomllib.loads(project)["project"]["dependencies"]]
    while open_:
        needed = open_.pop()
        if (key := (needed.name.lower(), *sorted(needed.extras))) not in metadata:
            metadata[key] = (package := distribution(needed.name)).metadata
            for other in map(Requirement, package.requires or ()):
                if not other.marker or any(other.marker.evaluate({"extra": extra}) for extra in ("", *needed.extras)):
                    open_.append(other)
    return {key[0]: value for key, value in metadata.items()}


def test_no_mandatory_dependency_is_copyleft(repository):
    licences = {name: licence(found) for name, found in mandatory((repository / "pyproject.toml").read_text()).items()}
    assert len(licences) > 50 and {"torch", "nvflare", "pydicom"} <= set(licences)
    assert all(map(COPYLEFT.search, ("GPL-3.0-or-later", "MIT AND LGPL-2.1-only", "GNU Affero General Public License")))
    assert {name: text for name, text in licences.items() if COPYLEFT.search(text)} == {}
    assert [name for name, text in licences.items() if not text and not name.startswith(OF_NVIDIA)] == []
