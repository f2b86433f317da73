"""Text for the warm start: reports in ever new styles, built from frames that no site uses.

It gives a tokenizer the words of chest radiology and a decoder its language, without showing it any site's way of
writing: sizes, changes and terms are the shared vocabulary, but no sentence of the corpus is one of a site's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedtar_flare.synthetic.course import MOST_FINDINGS, stream
from fedtar_flare.synthetic.styles import STYLES
from fedtar_flare.synthetic.vocabulary import FINDINGS, kind_of, side_of

_TERMS: Mapping[str, tuple[str, ...]] = {
    "effusion": ("pleural effusion", "effusion", "pleural fluid", "fluid effusion of the pleural cavity"),
    "consolidation": ("consolidation", "airspace disease", "airspace opacity", "infiltrate", "pulmonary consolidation"),
    "nodule": ("nodule", "nodular density", "nodular shadowing", "nodular lesion", "pulmonary nodule"),
    "emphysema": ("emphysema", "emphysematous change", "emphysematous destruction", "pulmonary emphysema"),
    "cardiomegaly": ("cardiomegaly", "cardiac enlargement", "enlarged heart", "enlarged cardiac silhouette"),
    "lymphadenopathy": ("lymphadenopathy", "adenopathy", "enlarged mediastinal nodes", "enlarged lymph nodes"),
    "pneumothorax": ("pneumothorax", "pleural air", "apical pneumothorax"),
    "cavity": ("cavity", "cavitation", "cavitary destruction", "pulmonary cavity"),
    "fibrosis": ("fibrosis", "fibrotic change", "fibrotic remodelling", "pulmonary fibrosis"),
    "pericardial_effusion": ("pericardial effusion", "pericardial fluid", "fluid around the heart"),
}
_WHERE = ("on the {side}", "in the {side} lung", "at the {side} side", "within the {side} hemithorax", "{side} sided")
# {what} is a term with its side, {size} and {change} words of any reporting style
_FOUND = (
    "imaging reveals {what} ({size}){change}.",
    "evidence of {what}, graded {size}{change}.",
    "{what}: {size}{change}.",
    "appearance in keeping with {what} that is {size}{change}.",
    "{what} is present and {size}{change}.",
    "{size} is how we describe the {what}{change}.",
    "the study depicts {what}, {size} in extent{change}.",
    "known {what}, {size} today{change}.",
)
_CLEAR: Mapping[str, tuple[str, ...]] = {
    "effusion": (
        "pleura: no fluid seen.",
        "the costophrenic recesses are sharp, smooth and empty.",
        "pleural cavities without effusion.",
        "absence of pleural fluid.",
        "dry pleural surfaces on both sides.",
    ),
    "consolidation": (
        "no consolidation is seen.",
        "lungs free of infiltrate.",
        "parenchyma and lower lobes clear, no focal airspace opacity.",
        "lung tissue and texture of healthy appearance.",
    ),
    "nodule": (
        "no nodule is seen.",
        "upper lobes and apex without a nodule, a lesion or a tumour.",
        "negative for nodular lesion.",
    ),
    "emphysema": (
        "no emphysema is seen.",
        "all lobes well aerated and well expanded, airway open throughout.",
        "without emphysematous change.",
    ),
    "cardiomegaly": (
        "heart of ordinary dimensions.",
        "the cardiac silhouette, its chambers and great vessels have a normal outline and calibre.",
        "cardiothoracic ratio is regular.",
        "no cardiac enlargement, outline slim.",
    ),
    "lymphadenopathy": (
        "no adenopathy is seen.",
        "hila and mediastinum of usual contours, glands not swollen.",
        "central nodal compartment slender and unremarkable.",
        "lymph nodes: of usual number and size.",
    ),
}
_OPENING = (
    "thoracic CT.",
    "scan of the chest, reviewed today.",
    "axial multislice images of the thorax.",
    "repeat study, compared with the prior scan.",
    "follow-up with comparison, interval as available.",
    "chest imaging, structured checklist.",
    "referral from a colleague, with thanks: thank you, dear doctor.",
    "further control study with a second look.",
    "renewed review, report with summary.",
    "this study was reviewed again, as one before.",
)
_BONES = (
    "bones: no fracture, density and mineral content preserved.",
    "the thoracic cage and vertebrae are intact and strong.",
    "osteopenia, spondylosis and degeneration of the spine.",
    "osseous structures are thinned, worn or demineralised.",
    "no acute bone abnormality of the skeleton, structures sound and regular.",
    "skeletal degenerative changes with wedging, reduced vertebral density.",
    "vertebral wear.",
)
_CLOSING = (
    "impression today: {names}.",
    "conclusion and summary: {names} in all.",
    "in short we note {names}.",
    "overall: {names}.",
    "I see and find {names}.",
    "findings positive for {names}.",
)
_NORMAL_CLOSING = (
    "impression: normal chest.",
    "conclusion: nothing abnormal, nothing pathological.",
    "overall a normal study.",
    "score 0 on every item.",
    "study closed, chronic disease negative.",
)
_RESOLVED = (
    "{names} cleared since the prior scan.",
    "no longer present: {names}.",
    "complete resolution: {names}.",
    "{names} has disappeared, item gone.",
    "not seen any more: {names}.",
    "{names} resolved then.",
)
_ASIDE = (
    "a fluid layer measuring 25 mm in diameter would be thin, one measuring 75 mm deep.",
    "amount, volume and extent are rated from none to high.",
    "the lower zone and the upper zone are scored, with class and grade noted.",
    "recesses have basal and apical contours; nothing shows, but all looks even.",
    "the report notes score, ratio, number, area and diameter.",
    "heart and lobe look as before, one around the other, near the base.",
    "disease occupies or surrounds a segment, displaces vessels, widens a space, projects over a lobe and affects it.",
    "there is a central focal lesion.",
    "aeration follows the limits that the pleural spaces allow.",
    "it contains what lies within; it involves some degree of change, as demonstrated.",
)


def text_corpus(n: int, seed: int) -> list[str]:
    """Reports in styles that are drawn anew for every report; for tokenizer and language warm-up.

    Args:
        n: number of reports.
        seed: two seeds give different reports; none of them is ever a site's.
    """
    return [corpus_report(stream("corpus", seed, i))[0] for i in range(n)]


def corpus_report(rng: np.random.Generator) -> tuple[str, frozenset[str]]:
    """One report of the corpus and the findings that it states."""
    count = int(rng.integers(0, MOST_FINDINGS + 1))
    chosen = [str(name) for name in rng.permutation(FINDINGS)[: count + int(rng.integers(0, 2))]]
    findings, resolved = chosen[:count], chosen[count:]
    follow_up = bool(rng.random() < 0.6)
    wording = STYLES[int(rng.integers(len(STYLES)))][int(rng.integers(2))]
    body = [_found(rng, name, changes=wording.changes.split("|") if follow_up else ()) for name in findings]
    body += [
        _pick(rng, lines) for kind, lines in _CLEAR.items() if kind not in map(kind_of, findings) and rng.random() < 0.5
    ]
    body += [_pick(rng, lines) for lines in (_BONES, _ASIDE) if rng.random() < 0.4]
    rng.shuffle(body)
    names = ", ".join(_named(rng, name) for name in findings)
    closing = _pick(rng, _CLOSING).format(names=names) if findings else _pick(rng, _NORMAL_CLOSING)
    lines = [_pick(rng, _OPENING), *body]
    if resolved and follow_up:
        lines.append(_pick(rng, _RESOLVED).format(names=", ".join(_named(rng, name) for name in resolved)))
    if rng.random() < 0.6:
        lines.append(closing)
    return _text(rng, lines), frozenset(findings)


def styled_report(rng: np.random.Generator, sizes: Mapping[str, int]) -> str:
    """A report on an image, in a style that is drawn anew: its findings with their sizes, and no change of any.

    Its opening is drawn like the rest, so that it may speak of a comparison that nothing in the image answers to.

    Args:
        rng: draws the style.
        sizes: finding id to size (1 to 3), for every finding that the image shows.
    """
    body = [_found(rng, name, (), size) for name, size in sizes.items()]
    body += [
        _pick(rng, lines) for kind, lines in _CLEAR.items() if kind not in map(kind_of, sizes) and rng.random() < 0.8
    ]
    rng.shuffle(body)
    names = ", ".join(_named(rng, name) for name in sizes)
    lines = [_pick(rng, _OPENING), *body]
    if rng.random() < 0.4:
        lines.append(_pick(rng, _CLOSING).format(names=names) if sizes else _pick(rng, _NORMAL_CLOSING))
    return _text(rng, lines)


def _text(rng: np.random.Generator, lines: Sequence[str]) -> str:
    if rng.random() < 0.15:
        return " ".join(line.upper() for line in lines)
    return " ".join(line[0].upper() + line[1:] for line in lines)


def _found(rng: np.random.Generator, name: str, changes: Sequence[str], size_is: int | None = None) -> str:
    kind = kind_of(name)
    pair = STYLES[int(rng.integers(len(STYLES)))]
    words = pair[int(rng.integers(2))].sizes[kind].split("|")
    size = _pick(rng, words) if size_is is None else words[size_is - 1]
    change = f", {_pick(rng, changes).strip(' ,()')}" if changes and rng.random() < 0.5 else ""
    return _pick(rng, _FOUND).format(what=_named(rng, name), size=size, change=change)


def _named(rng: np.random.Generator, name: str) -> str:
    term, side = _pick(rng, _TERMS[kind_of(name)]), side_of(name)
    if not side:
        return term
    where = _pick(rng, _WHERE).format(side=side)
    return f"{where} {term}" if where.startswith(side) else f"{term} {where}"


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]
