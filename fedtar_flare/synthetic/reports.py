"""A reporting style, and the report of a visit in its words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedtar_flare.synthetic.vocabulary import FINDINGS, kind_of, side_of

Change = Literal["first", "new", "larger", "smaller", "stable"]
BONES = "bones"
"""Section whose sentence depends on the patient's age group, never on the image."""


@dataclass(frozen=True, slots=True)
class State:
    """One finding at one visit."""

    size: int  # 1 (small) to 3 (large)
    change: Change = "first"  # against the visit before; ``first`` at a first visit


@dataclass(frozen=True)
class Wording:
    """Templates of one style. Nothing is drawn at random: the same visit always gives the same text."""

    opening: Sequence[str]
    """First words at a first visit, and at a later one."""
    sections: Sequence[tuple[Sequence[str], str]]
    """Kinds of finding and the sentence when none of them is there; ``(("bones",), "")`` places that on bones."""
    sentences: Mapping[str, str]
    """Per kind a sentence with ``{size}``, ``{side}`` and ``{change}``."""
    sizes: Mapping[str, str]
    """Per kind three words for small, moderate and large, separated by ``|``."""
    changes: str
    """For new, larger and smaller, separated by ``|``; a stable finding gets no word."""
    resolved: str
    """Sentence with ``{names}``."""
    bones: Sequence[str]
    """Sentence under 65 years, and from 65 years on."""
    impression: Sequence[str] = ("", "")
    """Closing sentence with ``{names}``, and the one for a normal study."""
    impression_first: bool = False
    """Whether the impression follows the opening."""


def write_report(
    wording: Wording,
    findings: Mapping[str, State],
    *,
    resolved: Sequence[str] = (),
    follow_up: bool = False,
    older: bool = False,
) -> str:
    """Put a visit into words, one paragraph: findings by id, and those that have ``resolved`` since the visit before.

    ``follow_up``: a visit came before; ``older``: the patient is 65 or more.
    """
    changes = dict(zip(("new", "larger", "smaller"), wording.changes.split("|"), strict=True))
    sentences = [wording.opening[follow_up]]
    for kinds, normal in wording.sections:
        if BONES in kinds:
            sentences.append(wording.bones[older])
            continue
        here = [name for kind in kinds for name in FINDINGS if kind_of(name) == kind and name in findings]
        for name in here:
            kind, state = kind_of(name), findings[name]
            size, change = wording.sizes[kind].split("|")[state.size - 1], changes.get(state.change, "")
            sentences.append(wording.sentences[kind].format(size=size, side=side_of(name), change=change))
        if not here:
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
