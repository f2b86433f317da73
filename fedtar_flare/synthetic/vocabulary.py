"""The findings of the synthetic cohort: a kind, and a side where it has one; ``findings.yaml`` says what each is."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fedtar_flare.core.files import read_yaml

KIND: Mapping[str, Any] = read_yaml(Path(__file__).with_name("findings.yaml"), "kinds of finding")
"""Kind to its entry in the file."""
KINDS = tuple(KIND)
KNOWN_KINDS = tuple(kind for kind, entry in KIND.items() if entry.get("known"))
NEW_KINDS = tuple(kind for kind in KINDS if kind not in KNOWN_KINDS)
SIDED = frozenset(kind for kind, entry in KIND.items() if entry.get("sided"))


def ids(kinds: Sequence[str]) -> tuple[str, ...]:
    """Finding ids of kinds."""
    names = [(f"{kind}_right", f"{kind}_left") if kind in SIDED else (kind,) for kind in kinds]
    return tuple(chain.from_iterable(names))


KNOWN_FINDINGS, NEW_FINDINGS = ids(KNOWN_KINDS), ids(NEW_KINDS)
FINDINGS = KNOWN_FINDINGS + NEW_FINDINGS  # every finding id, in a fixed order


def kind_of(finding: str) -> str:
    """Kind of a finding: its id without the side."""
    return finding.removesuffix("_right").removesuffix("_left")


def side_of(finding: str) -> str:
    """``right``, ``left``, or empty for a finding without a side."""
    return finding[len(kind_of(finding)) + 1 :]
