"""A blinded reading of drafts beside reference reports; page and key stay at the hospital, for their owner only."""

import base64
import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from pydantic import Field

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import PRIVATE, private_folder, read_json, write_bytes, write_json, write_text
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.core.text import plain
from fedtar_flare.data.cohort import Patient, Visit
from fedtar_flare.imaging.limits import Limits, applied
from fedtar_flare.imaging.pipeline import Size, prepare
from fedtar_flare.metrics.radeval import RadEvalMetrics
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.metrics.significance import Interval, compare, holm, kappa_score, kendall_tau, mean_score, over_seeds
from fedtar_flare.metrics.text_sums import reports_of_texts, rules_of, text_sums
from fedtar_flare.reporting.render import png, render

READING = "reading-"  # prefix of the names of pages, keys and folders of images
Side = Literal["A", "B"]
QUESTIONS = ("preferred", "significant error", "acceptable as it is")
Studies = tuple[Sequence[Patient], Limits]  # where a page's images are found, and what reading one may take
COLUMNS = 6  # of slices in a picture of a CT
LARGEST = 2560  # pixels of a picture's side


class Case(Settings):
    """A case in the key of a page: patient, visit, the side with the draft, and the draft's SHA-256."""

    patient: str
    visit: str
    draft: Side
    sha256: str = ""


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


def write_reading(
    folder: Path, rows: Sequence[dict[str, Any]], cases: int, out: Path | None, visit_ids: bool, studies: Studies | None
) -> Path:
    """Write a page for readers and its key, without line breaks, which would give the draft away.

    Images of ``studies`` lie in a folder beside the page, named by the case's number, which tells neither side.
    """
    if cases < 1:
        raise ConfigError(f"--cases must be at least 1, not {cases}")
    chance, page = secrets.SystemRandom(), secrets.token_hex(8)
    file, key_file = out or folder / f"{READING}{page}.html", folder / f"{READING}{page}.json"
    images_folder = file.with_name(f"{READING}{page}")
    drawn = chance.sample(list(rows), min(cases, len(rows)))
    images = _write_images(images_folder, drawn, *studies) if studies else [{} for _ in drawn]
    key, shown = [], []
    for row, of_case in zip(drawn, images, strict=True):
        draft, reference = (" ".join(plain(row[name]).split()) for name in ("text", "reference"))
        side: Side = chance.choice(("A", "B"))
        patient, visit, digest = _draft(row)
        key.append(Case(patient=patient, visit=visit, draft=side, sha256=digest))
        texts = {"a": draft, "b": reference} if side == "A" else {"a": reference, "b": draft}
        shown.append(texts | of_case | ({"visit": key[-1].visit} if visit_ids else {}))
    script = Path(__file__).with_name("templates").joinpath("reading.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = render("reading.html", page=page, cases=shown, script=Markup(script), digest=Markup(digest))
    try:
        write_json(key_file, {"cases": [case.to_dict() for case in key]}, PRIVATE)
        return write_text(file, html, PRIVATE)
    except BaseException:  # neither a key nor images stay without their page
        key_file.unlink(missing_ok=True)
        shutil.rmtree(images_folder, ignore_errors=True)
        raise


def _write_images(
    folder: Path, rows: Sequence[Mapping[str, Any]], patients: Sequence[Patient], limits: Limits
) -> list[dict[str, str]]:
    """Write a picture of each case and of the patient's visit before; their addresses on the page."""
    visits: dict[tuple[str, str, str], dict[str, Visit]] = {}
    for patient in patients:
        for before, now in zip((None, *patient.visits), patient.visits, strict=False):
            visits[now.patient_id, now.visit_id, now.report] = {"now": now} | ({"before": before} if before else {})
    keys = [(str(row["patient_id"]), str(row["visit_id"]), row["reference"]) for row in rows]
    if missing := sum(key not in visits for key in keys):
        text = f"--images: {missing} of {len(keys)} cases are not in it with these reports"
        raise ConfigError(f"{text}; name the site file or manifest that the run had")
    addresses: list[dict[str, str]] = [{} for _ in keys]
    with tempfile.TemporaryDirectory(prefix=READING, dir=private_folder(folder.parent)) as cache:
        made = private_folder(Path(cache) / folder.name)
        for i, key in enumerate(keys):
            for when, visit in visits[key].items():
                addresses[i][when] = f"{folder.name}/{i + 1}-{when}.png"
                with applied(limits):
                    write_bytes(made.parent / addresses[i][when], png(_picture(visit, made.parent), LARGEST), PRIVATE)
        made.rename(folder)
    return addresses


def _picture(visit: Visit, cache: Path) -> np.ndarray:
    """Slices of a CT in rows, in the lung window and below it the mediastinal one; else the views side by side."""
    if visit.modality != "ct":
        image = prepare(visit, Size(LARGEST // 2, 1, lateral=True), cache).image  # (views, 3, H, W)
        return np.hstack([*image.transpose(0, 2, 3, 1)])
    image = prepare(visit, Size(LARGEST // 10, 2 * COLUMNS), cache).image  # (slices, windows, H, W)
    rows = [np.hstack([*image[i : i + COLUMNS, window]]) for i in range(0, len(image), COLUMNS) for window in (0, 1)]
    return np.vstack(rows)


def reading_results(
    folder: Path, files: Sequence[Path], rows: Sequence[dict[str, Any]], models: RadEvalMetrics | None = None
) -> dict[str, Any]:
    """Evaluate the answers of a page's readers, and how the scores of ``rows`` and of ``models`` agree with them."""
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
        shares = {"draft": over_seeds([draft], share=True), "reference": over_seeds([reference], share=True)}
        scores[name] = shares | {"difference": difference}
        if len(readers) > 1 and common:
            codes = np.array([[answers[case][reader][i] for reader in readers] for case in common])  # (N, R, 2)
            items, kinds = (np.concatenate([codes[..., 0], codes[..., 1]]), 2) if i else (codes @ [2, 1], 3)
            rated = [patients[case] for case in common] * (len(items) // len(common))
            agreement[name] = over_seeds([kappa_score(rated, items, kinds)])
    counts = {"cases": len(answers), "patients": len(set(whose)), "read_by_all": len(common)}
    numbers = {of.reader: len(of.answers) for of in of_files}
    ratings = {}
    for case, said in answers.items():
        in_favour = [values[:, 0] @ [1, -1, 1] for values in said.values()]  # an error speaks against the draft
        ratings[key[case - 1].patient, key[case - 1].visit, key[case - 1].sha256] = float(np.mean(in_favour))
    results = {"answers": numbers, **counts, "scores": scores, "p": holm(tests), "agreement": agreement}
    return results | {"tau": _with_scores(ratings, rows, models), "models": models.about if models else ""}


def _with_scores(
    ratings: Mapping[tuple[str, str, str], float], rows: Sequence[dict[str, Any]], models: RadEvalMetrics | None
) -> dict[str, tuple[Interval, int]]:
    """Kendall's tau of each score with the readers' rating of drafts, and of how many; the best agreement first."""
    of_rows = [_draft(row) for row in rows]
    rated, taus = [i for i, of in enumerate(of_rows) if of in ratings], {}
    if not rated:
        return {}
    references, drafts = ([row[name] for row in rows] for name in ("reference", "text"))
    sums = text_sums(reports_of_texts([f"{i:09d}" for i in range(len(rows))], references, drafts, rules_of(rows)))
    values = {name: of.of_each[rated] for name, of in sums.items()}
    if models:
        by_model = models.values([references[i] for i in rated], [drafts[i] for i in rated])
        values |= {name: np.array(of, dtype=np.float64) for name, of in by_model.items()}
    patients, said = np.array([of_rows[i][0] for i in rated]), np.array([ratings[of_rows[i]] for i in rated])
    for name, of_drafts in values.items():
        defined, better = np.isfinite(of_drafts), SCORES[name].higher_is_better
        if better is not None and defined.any():
            signed = of_drafts[defined] if better else -of_drafts[defined]
            taus[name] = kendall_tau(patients[defined], signed, said[defined]), int(defined.sum())
    known = [item for item in taus.items() if np.isfinite(item[1][0].value)]
    return dict(sorted(known, key=lambda item: -item[1][0].value))


def _draft(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """A draft's patient, visit and SHA-256, by which it is known to be the one that was read."""
    digest = hashlib.sha256(row["text"].encode()).hexdigest()
    return f"{row.get('site', '')} {row['patient_id']}", str(row["visit_id"]), digest
