"""Reporting styles, and the report of a visit in the words of one.

Styles say the same in different words, order and structure, each before and after the planted change. The generic
style is the warm start's and no site's.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedtar_flare.core.files import read_yaml
from fedtar_flare.synthetic.vocabulary import FINDINGS, KINDS, kind_of, side_of

Change = Literal["first", "new", "larger", "smaller", "stable"]
BONES = "bones"  # section whose sentence depends on the patient's age group, never on the image


@dataclass(frozen=True, slots=True)
class State:
    """One finding at one visit."""

    size: int  # 1 (small) to 3 (large)
    change: Change = "first"  # against the visit before; ``first`` at a first visit


@dataclass(frozen=True)
class Wording:
    """Templates of one style. Nothing is drawn at random: the same visit always gives the same text."""

    opening: Sequence[str]  # first words at a first visit, and at a later one
    sections: Sequence[tuple[Sequence[str], str]]
    """Kinds of finding and the sentence without any of them; ``(("bones",), "")`` is where that on bones goes."""
    sentences: Mapping[str, str]  # per kind a sentence with ``{size}``, ``{side}`` and ``{change}``
    sizes: Mapping[str, str]  # per kind three words for small, moderate and large, separated by ``|``
    changes: str  # for new, larger and smaller, separated by ``|``; a stable finding gets no word
    resolved: str  # sentence with ``{names}``
    bones: Sequence[str]  # sentence under 65 years, and from 65 years on
    impression: Sequence[str] = ("", "")  # closing sentence with ``{names}``, and the one for a normal study
    impression_first: bool = False  # whether the impression follows the opening


def write_report(
    wording: Wording,
    findings: Mapping[str, State],
    *,
    resolved: Sequence[str] = (),
    follow_up: bool = False,
    older: bool = False,
) -> str:
    """Put a visit into one paragraph; ``follow_up``: a visit came before, ``older``: the patient is 65 or more."""
    changes = dict(zip(("new", "larger", "smaller"), wording.changes.split("|"), strict=True))
    sentences = [wording.opening[follow_up]]
    for kinds, normal in wording.sections:
        if BONES in kinds:
            sentences.append(wording.bones[older])
            continue
        present = [name for kind in kinds for name in FINDINGS if kind_of(name) == kind and name in findings]
        for name in present:
            kind, state = kind_of(name), findings[name]
            size, change = wording.sizes[kind].split("|")[state.size - 1], changes.get(state.change, "")
            sentences.append(wording.sentences[kind].format(size=size, side=side_of(name), change=change))
        if not present:
            sentences.append(normal)
    if resolved:
        sentences.append(wording.resolved.format(names=_names(wording, resolved)))
    some, none = wording.impression
    closing = some.format(names=_names(wording, list(findings))) if findings else none
    sentences.insert(1 if wording.impression_first else len(sentences), closing)
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences if sentence)


def _names(wording: Wording, findings: Sequence[str]) -> str:
    order = [kind for kinds, _ in wording.sections for kind in kinds]
    listed = sorted(findings, key=lambda name: (order.index(kind_of(name)), FINDINGS.index(name)))
    return ", ".join(f"{side_of(name)} {kind_of(name)}".strip().replace("_", " ") for name in listed)


def _wording(fields: Mapping[str, Any]) -> Wording:
    sizes = fields["sizes"]
    return Wording(**{**fields, "sizes": sizes if isinstance(sizes, dict) else dict.fromkeys(KINDS, sizes)})


_FILE = read_yaml(Path(__file__).with_name("styles.yaml"), "the wordings of reporting styles")
STYLES: tuple[tuple[Wording, Wording], ...] = tuple(
    (_wording(style["before"]), _wording(style["after"])) for style in _FILE["styles"]
)
"""Each style's wording before and after the planted change."""
GENERIC = _wording(_FILE["generic"])
"""The style of the warm start; never a site's, and without anything that the image does not show."""


def style_of(site: str) -> int:
    """Style of a site, 1 to 6: by the number that its name ends with (``site-2``: 2, ``site-8``: 2), else by a hash."""
    number = re.search(r"(\d+)$", site)
    value = int(number[1]) - 1 if number else int.from_bytes(hashlib.sha256(site.encode()).digest()[:8], "big")
    return value % len(STYLES) + 1


def wording_of(style: int, share: float, own_words: float = 1.0) -> Wording:
    """The wording of a style: a ``share`` of kinds in their second one, ``own_words`` of them in its own."""
    common, site = (_mixed(*STYLES[number - 1], share) for number in (1, style))
    return _mixed(common, site, own_words)


def _mixed(first: Wording, second: Wording, share: float) -> Wording:
    """A share of the kinds in the second's words, the others in the first's; under 0.5 all else is the first's."""
    if share in (0, 1):
        return second if share else first
    from_second = {kind for i, kind in enumerate(KINDS) if int((i + 1) * share) > int(i * share)}  # evenly spread
    words = {kind: second if kind in from_second else first for kind in KINDS}
    sentences = {kind: wording.sentences[kind] for kind, wording in words.items()}
    sizes = {kind: wording.sizes[kind] for kind, wording in words.items()}
    return replace(second if share >= 0.5 else first, sentences=sentences, sizes=sizes)
