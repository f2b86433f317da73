"""Cleaning of reports before training, by name and version: results with different cleanings cannot be compared.

``none`` (default): the text as stored. ``r2gen-v1``: what R2Gen (Chen et al., EMNLP 2020) and most later papers do with
MIMIC-CXR: lower case, one line, list numbers up to 5 and most punctuation removed, sentences joined by `` . ``. It
reproduces R2Gen's tokens with their oddities: ``11. `` becomes ``1``, ``1.5`` becomes ``15``.
:func:`fedtar_flare.metrics.language.clean` prepares texts for comparison instead.
"""

from __future__ import annotations

import re

from fedtar_flare.errors import ConfigError

CLEANINGS = ("none", "r2gen-v1")

# what falls inside a sentence; a hyphen stays, as in R2Gen, where it stands for a range of characters
_PUNCTUATION = re.compile(r"[.,?;:*!%^&_+()<=>@\[\]{}\"'/\\]")


def clean_report(text: str, cleaning: str = "none") -> str:
    """A report in the form used for training; raises :class:`ConfigError` for a cleaning not in ``CLEANINGS``.

    >>> clean_report("1. No effusion.  2. Well-defined nodule (right)..", "r2gen-v1")
    'no effusion . well-defined nodule right .'
    """
    if cleaning == "none":
        return text
    if cleaning != "r2gen-v1":
        raise ConfigError(f"cleaning '{cleaning}' is not one of {', '.join(CLEANINGS)}")
    text = re.sub(r" {2,}", " ", re.sub(r"_{2,}", "_", re.sub(r"\r?\n", " ", text)))
    text = re.sub(r"\.{2,}", ".", text).replace("1. ", "")
    for before in (". ", " "):
        for number in "2345":
            text = text.replace(f"{before}{number}. ", ". ")
    sentences = [_PUNCTUATION.sub("", sentence).strip() for sentence in text.strip().lower().split(". ")]
    return " ".join(" . ".join([*sentences, ""]).split())
