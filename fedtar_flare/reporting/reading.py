"""A blinded reading: a page on which readers judge drafts beside reference reports, and what they answered.

The page shows patients' reports; its key says whose they are and on which side the draft is. Both are written at the
hospital, for their owner alone, and stay there, as do the answers.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from markupsafe import Markup
from pydantic import Field

from fedtar_flare.errors import ConfigError, plain
from fedtar_flare.files import PRIVATE, read_json, write_json, write_text
from fedtar_flare.metrics.agreement import kappa
from fedtar_flare.metrics.significance import compare, holm, mean_score, over_seeds
from fedtar_flare.reporting.render import TEMPLATES, render
from fedtar_flare.settings import Settings, build

READING = "reading-"
"""How the names of pages and keys begin."""
Side = Literal["A", "B"]


class Case(Settings):
    """Whose report a case is, and on which side the draft is."""

    site: str
    patient_id: str
    visit_id: str
    draft: Side


class Answer(Settings):
    """A reader's answers to the four questions about one case, numbered from 1."""

    case: int = Field(ge=1)
    preference: Literal["A", "B", "same"]
    error_a: bool
    error_b: bool
    acceptable: Literal["A", "B", "both", "neither"]


class Answers(Settings):
    """The file that a page saves for one reader."""

    page: str = Field(pattern="^[0-9a-f]{16}$")
    reader: str = Field(pattern=r"^[\w .-]{1,40}$")
    answers: tuple[Answer, ...] = Field(min_length=1)


def write_reading(
    folder: Path, rows: Sequence[Mapping[str, Any]], cases: int, out: Path | None = None, visit_ids: bool = False
) -> Path:
    """Write a page with at most ``cases`` of a state's reports, drawn at random, and its key in ``folder``.

    ``rows`` are of :func:`.report_texts`. Line breaks are left out on both sides, since they would give the draft away.
    With ``visit_ids`` a case shows its visit's id, by which a reader finds the images. Returns the page's path,
    ``out`` or one in ``folder``.
    """
    if cases < 1:
        raise ConfigError(f"--cases must be at least 1, not {cases}")
    chance, page = secrets.SystemRandom(), secrets.token_hex(8)
    key, shown = [], []
    for row in chance.sample(list(rows), min(cases, len(rows))):
        draft, reference = (" ".join(plain(row[name]).split()) for name in ("text", "reference"))
        side: Side = chance.choice(("A", "B"))
        whose = {name: str(row.get(name, "")) for name in ("site", "patient_id", "visit_id")}
        key.append(Case(draft=side, **whose))
        one = {"a": draft, "b": reference} if side == "A" else {"a": reference, "b": draft}
        shown.append(one | ({"visit": whose["visit_id"]} if visit_ids else {}))
    write_json(folder / f"{READING}{page}.json", {"cases": [case.to_dict() for case in key]}, PRIVATE)
    script = (TEMPLATES / "reading.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {"page": page, "cases": shown, "script": Markup(script), "digest": Markup(digest)}
    return write_text(out or folder / f"{READING}{page}.html", render("reading.html", time_steps=1, **values), PRIVATE)


def reading_results(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """What readers of one page answered, by question: shares of drafts and of references, their difference, agreement.

    Each is a value with its 95 % interval over patients (the readers are taken as they are); p of the differences is
    corrected after Holm. Agreement is over the cases that every reader answered. ConfigError for a file that is none of
    this page, names a case that it has not, or a case or a reader twice.
    """
    found = [build(Answers, read_json(file), str(file)) for file in files]
    pages, readers = {one.page for one in found}, [one.reader for one in found]
    if len(pages) > 1:
        raise ConfigError("the files are answers to different pages: name those of one page")
    if len(set(readers)) < len(readers):
        raise ConfigError(f"two files are of one reader (readers: {', '.join(readers)}): name one of each")
    place = folder / f"{READING}{pages.pop()}.json"
    if not place.is_file():
        raise ConfigError(f"{folder} did not make the page of these answers: it has no {place.name}")
    key = [build(Case, case, str(place)) for case in read_json(place).get("cases", ())]
    said: dict[int, dict[str, dict[str, tuple[bool, bool]]]] = {}
    for file, one in zip(files, found, strict=True):
        for answer in one.answers:
            if answer.case > len(key):
                raise ConfigError(f"{file}: the page has no case {answer.case}, it has {len(key)}")
            if one.reader in said.setdefault(answer.case, {}):
                raise ConfigError(f"{file}: case {answer.case} is answered twice")
            said[answer.case][one.reader] = _of_sides(answer, key[answer.case - 1].draft)
    patients = {case: (key[case - 1].site, key[case - 1].patient_id) for case in sorted(said)}
    everyone = [case for case in patients if len(said[case]) == len(readers)]
    flat = [(patients[case], sides) for case in patients for sides in said[case].values()]
    tests = {}
    scores: dict[str, dict[str, Sequence[float]]] = {}
    agreement: dict[str, Sequence[float]] = {}
    for name in QUESTIONS:
        draft, reference = (mean_score([p for p, _ in flat], [one[name][i] for _, one in flat]) for i in (0, 1))
        test = compare([draft], [reference])
        tests[name] = test.p
        scores[name] = {
            "draft": over_seeds([draft]),
            "reference": over_seeds([reference]),
            "difference": test.difference,
        }
        if len(readers) > 1 and everyone:
            codes = np.array([[said[case][reader][name] for reader in readers] for case in everyone], dtype=int)
            both = name != "preferred"  # which is asked once, not of each side
            items = np.concatenate([codes[..., 0], codes[..., 1]]) if both else codes @ [2, 1]
            whose = [patients[case] for case in everyone] * (1 + both)
            agreement[name] = over_seeds([kappa(whose, items, 2 if both else 3)])
    return {
        "answers": {one.reader: len(one.answers) for one in found},
        "cases": len(patients),
        "patients": len(set(patients.values())),
        "scores": scores,
        "p": holm(tests),
        "agreement": agreement,
        "read_by_all": len(everyone),
    }


QUESTIONS = ("preferred", "significant error", "acceptable as it is")
"""What is told of both sides; the second and the third of the page's questions are one."""


def _of_sides(answer: Answer, draft: Side) -> dict[str, tuple[bool, bool]]:
    """By question what was said of the draft and of the reference."""
    sides: tuple[Side, Side] = ("A", "B") if draft == "A" else ("B", "A")
    errors = {"A": answer.error_a, "B": answer.error_b}
    told = [(answer.preference == one, errors[one], answer.acceptable in (one, "both")) for one in sides]
    return dict(zip(QUESTIONS, zip(*told, strict=True), strict=True))
