"""A blinded reading of drafts beside reference reports; page and key stay at the hospital, for their owner only."""

import base64
import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from pydantic import Field

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import PRIVATE, read_json, write_json, write_text
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.core.text import plain
from fedtar_flare.metrics.significance import compare, holm, kappa_score, mean_score, over_seeds
from fedtar_flare.reporting.render import render

READING = "reading-"  # prefix of the names of pages and keys
Side = Literal["A", "B"]
QUESTIONS = ("preferred", "significant error", "acceptable as it is")


class Case(Settings):
    """A case in the key of a page: patient, visit, and the side with the draft."""

    patient: str
    visit: str
    draft: Side


class Answer(Settings):
    """A reader's answers to the questions about one case, numbered from 1."""

    case: int = Field(ge=1)
    preference: Literal["A", "B", "same"]
    error_a: bool
    error_b: bool
    acceptable: Literal["A", "B", "both", "neither"]

    def of(self, side: Side) -> list[bool]:
        """Answers to :data:`QUESTIONS` for one side."""
        error = self.error_a if side == "A" else self.error_b
        return [self.preference == side, error, self.acceptable in (side, "both")]


class Answers(Settings):
    """The file that a page saves for one reader."""

    page: str = Field(pattern="^[0-9a-f]{16}$")
    reader: str = Field(pattern=r"^[\w .-]{1,40}$")
    answers: tuple[Answer, ...] = Field(min_length=1)


def write_reading(folder: Path, rows: Sequence[dict[str, Any]], cases: int, out: Path | None, visit_ids: bool) -> Path:
    """Write a page for readers and its key, without line breaks, which would give the draft away."""
    if cases < 1:
        raise ConfigError(f"--cases must be at least 1, not {cases}")
    chance, page = secrets.SystemRandom(), secrets.token_hex(8)
    key, shown = [], []
    for row in chance.sample(list(rows), min(cases, len(rows))):
        draft, reference = (" ".join(plain(row[name]).split()) for name in ("text", "reference"))
        side: Side = chance.choice(("A", "B"))
        key.append(Case(patient=f"{row.get('site', '')} {row['patient_id']}", visit=str(row["visit_id"]), draft=side))
        texts = {"a": draft, "b": reference} if side == "A" else {"a": reference, "b": draft}
        shown.append(texts | ({"visit": key[-1].visit} if visit_ids else {}))
    write_json(folder / f"{READING}{page}.json", {"cases": [case.to_dict() for case in key]}, PRIVATE)
    script = Path(__file__).with_name("templates").joinpath("reading.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = render("reading.html", page=page, cases=shown, script=Markup(script), digest=Markup(digest))
    return write_text(out or folder / f"{READING}{page}.html", html, PRIVATE)


def reading_results(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Evaluate the answers of a page's readers."""
    of_files = [build(Answers, read_json(file), str(file)) for file in files]
    readers, keys = [of.reader for of in of_files], {folder / f"{READING}{of.page}.json" for of in of_files}
    if len(keys) > 1 or not (key_file := keys.pop()).is_file():
        raise ConfigError(f"{folder}: the answers must be of one page that was made from it, whose key is there")
    if len(set(readers)) < len(readers):
        raise ConfigError(f"two files are of one reader (readers: {', '.join(readers)}): name one of each")
    key = [build(Case, case, str(key_file)) for case in read_json(key_file).get("cases", ())]
    answers: dict[int, dict[str, NDArray[np.bool_]]] = {}  # by case and reader: (questions, draft and reference)
    for file, of in zip(files, of_files, strict=True):
        for answer in of.answers:
            if answer.case > len(key):
                raise ConfigError(f"{file}: the page has no case {answer.case}, it has {len(key)}")
            if of.reader in answers.setdefault(answer.case, {}):
                raise ConfigError(f"{file}: case {answer.case} is answered twice")
            sides: tuple[Side, Side] = ("A", "B") if key[answer.case - 1].draft == "A" else ("B", "A")
            answers[answer.case][of.reader] = np.array([answer.of(side) for side in sides]).T
    patients = {case: key[case - 1].patient for case in answers}
    whose = [patients[case] for case in answers for _ in answers[case]]
    every = np.array([values for by_reader in answers.values() for values in by_reader.values()])
    common = [case for case in answers if len(answers[case]) == len(readers)]
    scores, tests, agreement = {}, {}, {}
    for i, name in enumerate(QUESTIONS):
        draft, reference = (mean_score(whose, every[:, i, side]) for side in (0, 1))
        difference, tests[name], *_ = compare([draft], [reference])
        scores[name] = {"draft": over_seeds([draft]), "reference": over_seeds([reference]), "difference": difference}
        if len(readers) > 1 and common:
            codes = np.array([[answers[case][reader][i] for reader in readers] for case in common])  # (N, R, 2)
            items, kinds = (np.concatenate([codes[..., 0], codes[..., 1]]), 2) if i else (codes @ [2, 1], 3)
            rated = [patients[case] for case in common] * (len(items) // len(common))
            agreement[name] = over_seeds([kappa_score(rated, items, kinds)])
    counts = {"cases": len(answers), "patients": len(set(whose)), "read_by_all": len(common)}
    numbers = {of.reader: len(of.answers) for of in of_files}
    return {"answers": numbers, **counts, "scores": scores, "p": holm(tests), "agreement": agreement}
