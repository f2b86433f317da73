"""A site's own page, which stays there: patients' visits with draft, reference and grades, and scores of groups."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from pydantic import TypeAdapter

from fedtar_flare.core.errors import FedTARError
from fedtar_flare.core.files import PRIVATE, write_json, write_text
from fedtar_flare.data.cohort import Modality, Sample
from fedtar_flare.imaging.readers.dicom_files import headers
from fedtar_flare.imaging.readers.dicom_tags import first
from fedtar_flare.learning.labels import labeler
from fedtar_flare.metrics.agreement import label_counts
from fedtar_flare.metrics.grades import PARTS, Grade, grade
from fedtar_flare.metrics.labeler import classes_of, rules_for
from fedtar_flare.metrics.significance import against_others, holm, label_score, mean_score
from fedtar_flare.reporting.render import png_address, render

if TYPE_CHECKING:
    from fedtar_flare.data.cohort import Visit
    from fedtar_flare.learning.evaluation import Evaluated
    from fedtar_flare.learning.site_model import SiteModel

EXAMPLES_FILE, EXAMPLES_PAGE = "examples.json", "examples.html"
EXAMPLES_FOLDER = "examples"  # of a simulated run's results, with one file per synthetic site
PATIENTS, VISITS = 3, 6  # on the page, and the most visits of each
KEY_PIXELS = 148  # side of a key slice, as it is shown
PIXELS = 256**2  # most bytes of a visit's pictures before they are compressed
MOST_PICTURES = 1_500_000  # most characters of all pictures of a run's page; with more, it shows none
AGES = ((0, 40, "under 40"), (40, 60, "40 to 59"), (60, 80, "60 to 79"), (80, 131, "80 and older"))
_WORDS = re.compile(r"\s*(?:\w+(?:[.,]\d+)*|[^\w\s]|\Z)")  # a word or sign, with the space before it

_Change = tuple[str, tuple[str, ...]]  # a claim of change, and pictures of key slices: before, where shown, and now


@dataclass(frozen=True, slots=True)
class Example:
    """A visit. Patients and their visits are numbered from 1 in the page's order, which does not reveal identities."""

    patient: int
    visit: int
    time_step: int
    draft: str
    reference: str
    pictures: tuple[str, ...] = ()  # data addresses of PNGs
    caption: str = ""  # which slices they are; empty of a picture without slices
    changes: tuple[_Change, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupScore:
    """A group's score, by its name in the registry, and that of all other patients, with p corrected after Holm."""

    kind: str
    group: str
    patients: int
    score: str
    value: float
    others: float
    p: float

    @property
    def behind(self) -> bool:
        """Whether the group's score is significantly lower."""
        return self.value < self.others and self.p < 0.05


@dataclass(frozen=True, slots=True)
class SiteExamples:
    """Examples of a site after a round."""

    site: str
    round: int
    synthetic: bool
    modality: Modality
    examples: tuple[Example, ...]
    groups: tuple[GroupScore, ...] = ()

    def grades(self, example: Example) -> tuple[Grade, ...]:
        """Grade the findings of a draft by the rules for these reports."""
        rules = labeler("synthetic" if self.synthetic else rules_for(self.modality)).rules
        assert rules is not None
        return grade(example.draft, example.reference, rules)


_Piece = tuple[str, str]  # a mark, or empty, and the text that has it
_SITE_EXAMPLES = TypeAdapter(SiteExamples)


def choose(patients: Sequence[str]) -> list[int]:
    """Indices of the first patients' reports, whatever their scores: at most ``VISITS`` of each of ``PATIENTS``."""
    chosen: dict[str, list[int]] = {}
    for i, patient in enumerate(patients):
        chosen.setdefault(patient, []).append(i)
    return [i for indices in list(chosen.values())[:PATIENTS] for i in indices[:VISITS]]


def examples_of(scored: Evaluated, model: SiteModel) -> tuple[Example, ...]:
    """Take the first patients' drafts as examples, with pictures of their visits and of the changes claimed of them."""
    chosen = choose([sample.visit.patient_id for sample in scored.samples])
    numbers: dict[str, int] = {}
    visits: Counter[str] = Counter()
    examples = []
    for sample in (scored.samples[i] for i in chosen):
        visit, (prepared,) = sample.visit, model.prepared([sample])
        visits[visit.patient_id] += 1
        pictures, caption = _pictures(prepared.image, colour=visit.modality == "photograph")
        examples.append(
            Example(
                patient=numbers.setdefault(visit.patient_id, len(numbers) + 1),
                visit=visits[visit.patient_id],
                time_step=sample.time_step,
                draft=scored.drafts[visit],
                reference=visit.report,
                pictures=pictures,
                caption=caption,
                changes=() if sample.prior is None else _changes(sample, scored.drafts, model),
            )
        )
    return tuple(examples)


def _changes(sample: Sample, texts: Mapping[Visit, str], model: SiteModel) -> tuple[_Change, ...]:
    """The changes that are claimed of a visit, each with the slices that the finding's query attends to most."""
    images = model.images([sample])
    if model.cohort.timeline.prior_generated:
        images.prior = model.prior([sample], texts=texts)
    before = None if images.prior is None else images.prior.images
    changes = []
    for read in model.read_findings(sample, images, texts[sample.visit]) or ():
        if read.change not in (None, "unchanged", "uncertain"):
            claim, pictures = f"{', '.join(filter(None, read[:2]))}: {read.change}, {read.certainty['change']:.2f}", []
            for name, batch, k in zip(("before", "now"), (before, images), read.slices[::-1], strict=True):
                if batch is not None and k is not None:
                    image, colour = batch.images[0].cpu().numpy(), sample.visit.modality == "photograph"
                    pictures.append(_picture(image, k, colour, KEY_PIXELS))
                    claim += f"; {name}" + (f" slice {k + 1} of {len(image)}" if len(image) > 1 else "")
            changes.append((claim, tuple(pictures)))
    return tuple(changes)


def _picture(image: np.ndarray, k: int, colour: bool, side: int) -> str:
    """Slice k of an image (S, 3, H, W); channel 0 is the lung window."""
    return png_address(image[k].transpose(1, 2, 0) if colour else image[k, 0], side)


def _pictures(image: np.ndarray, colour: bool) -> tuple[tuple[str, ...], str]:
    """Pictures of the slices at a quarter, half and three quarters of an image (S, 3, H, W), and their caption."""
    count = len(image)
    slices = sorted({count // 4, count // 2, 3 * count // 4})
    side = math.isqrt(PIXELS // (len(slices) * (3 if colour else 1)))
    numbers = ", ".join(str(k + 1) for k in slices)
    caption = f"slices {numbers} of {count}, from feet to head, lung window" if count > 1 else ""
    return tuple(_picture(image, k, colour, side) for k in slices), caption


def write_examples(folder: Path, examples: SiteExamples) -> Path:
    """Write examples and their page, for their owner only."""
    write_json(folder / EXAMPLES_FILE, asdict(examples), PRIVATE)
    return write_text(folder / EXAMPLES_PAGE, examples_page(examples), PRIVATE)


def read_examples(path: Path) -> SiteExamples:
    """Read the examples that :func:`write_examples` wrote."""
    try:
        return _SITE_EXAMPLES.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise FedTARError(f"{path} holds no examples of this package ({type(error).__name__})") from error


def examples_page(examples: SiteExamples) -> str:
    """The page of one site as well-formed HTML."""
    return render("examples_page.html", examples=examples, content=render_examples([examples], headed=False))


def render_examples(sites: Sequence[SiteExamples], headed: bool) -> Markup:
    """The patients of each site, visit by visit; ``headed`` gives each site its name."""
    if sum(len(picture) for s in sites for e in s.examples for picture in e.pictures) > MOST_PICTURES:
        sites = [replace(s, examples=tuple(replace(e, pictures=()) for e in s.examples)) for s in sites]
    return render("examples.html", sites=sites, headed=headed, counts=_counts, differing=_differing, row=_row)


def _counts(site: SiteExamples) -> str:
    """How many findings are correct in each part, of those that are graded."""
    grades = [grade for example in site.examples for grade in site.grades(example)]
    counts = [f"Presence {sum(grade.presence == 'right' for grade in grades)} of {len(grades)} correct"]
    for part in PARTS:
        marks = [mark for grade in grades if (mark := getattr(grade, part)) is not None]
        counts.append(f"{part} {sum(marks)} of {len(marks)}")
    return ", ".join(counts)


def _row(grade: Grade) -> tuple[str, list[_Piece]]:
    """A finding's worst mark (``right``, ``part`` or ``wrong``); mark and words of its presence and of each part."""
    cells = [("right", "correct") if grade.presence == "right" else ("wrong", str(grade.presence))]
    for part in PARTS:
        reference, draft = grade.words.get(part, ("", ""))
        words = draft if draft == reference else f"{draft or '–'} ({reference or '–'})"
        cells.append(({True: "right", False: "part", None: ""}[getattr(grade, part)], words))
    marks = {mark for mark, _ in cells}
    return next(mark for mark in ("wrong", "part", "right") if mark in marks), cells


def _differing(draft: str, reference: str) -> tuple[list[_Piece], list[_Piece]]:
    """Both texts in pieces, marked ``only`` where the other text has not the same words at this place."""
    texts = [_WORDS.findall(text.strip()) for text in (draft, reference)]
    left, right = ([word.strip().lower() for word in words] for words in texts)
    blocks = difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    both: list[list[_Piece]] = []
    for words, starts in zip(texts, ([b.a for b in blocks], [b.b for b in blocks]), strict=True):
        pieces: list[_Piece] = []
        at = 0
        for block, start in zip(blocks, starts, strict=True):
            only, same = "".join(words[at:start]), "".join(words[start : start + block.size])
            bare = only.lstrip()
            pieces += [("", only[: len(only) - len(bare)]), ("only", bare), ("", same)]
            at = start + block.size
        both.append([piece for piece in pieces if piece[1]])
    return both[0], both[1]


def sex_of(sample: Sample) -> str:
    """Name a patient's sex."""
    return {"F": "women", "M": "men"}.get(sample.sex or "", "unknown")


def age_of(sample: Sample) -> str:
    """Name the band of a patient's age at the visit."""
    age = -1 if sample.visit.age is None else sample.visit.age
    return next((name for low, high, name in AGES if low <= age < high), "unknown")


def scanner_of(sample: Sample) -> str:
    """The manufacturer by the visit's first DICOM file."""
    with suppress(Exception):  # pydicom may raise anything on broken bytes, which should fail no round
        return first(next(headers(sample.visit.image)), "Manufacturer").upper() or "unknown"
    return "unknown"


def scores_by_group(samples: Sequence[Sample], rows: Sequence[Mapping[str, Any]], least: int) -> tuple[GroupScore, ...]:
    """Score groups of patients by sex, age and scanner at the first of their visits: which are served worse?"""
    if not samples:
        return ()
    patients, rules = [row["patient_id"] for row in rows], rules_for(samples[0].visit.modality)
    blank = ("b" * len(classes_of(rules)),) * 2  # of a report in another language
    counts = label_counts(classes_of(rules), [row["labels"].get(rules, blank) for row in rows])
    scores = {"rouge_l": mean_score(patients, [row["rouge_l"] for row in rows])}
    scores[f"{rules.replace('-', '_')}_f1"] = label_score(patients, counts, "micro", "f1")
    firsts = {sample.visit.patient_id: sample for sample in reversed(samples)}
    groups = []
    for kind, name_of in {"sex": sex_of, "age": age_of, "scanner": scanner_of}.items():
        group_of = {patient: name_of(sample) for patient, sample in firsts.items()}
        for group, (score, sums) in product(sorted(set(group_of.values())), scores.items()):
            members = np.array([group_of[patient] == group for patient in sums.patients])
            if min(members.sum(), (~members).sum()) >= least:
                value, others = (float(sums.score(sums.sums[who].sum(0)[None])[0]) for who in (members, ~members))
                p = against_others(sums, members)
                groups.append(GroupScore(kind, group, int(members.sum()), score, value, others, p))
    corrected = holm({i: group.p for i, group in enumerate(groups) if np.isfinite(group.p)})
    return tuple(replace(groups[i], p=value) for i, value in corrected.items())
