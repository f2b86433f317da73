"""Which reporting style a site has, and the generic style of the warm start.

Styles say the same in different words, order and structure. Each has two wordings, one before and one after the planted
change (``CohortOptions.change``). The generic style belongs to no site: a model that was warm-started on it knows the
findings, but still has to learn how each site writes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import Literal

from fedtar_flare.errors import ConfigError
from fedtar_flare.synthetic.reports import BONES, Wording, per_kind
from fedtar_flare.synthetic.styles_1_to_3 import STYLE_1, STYLE_2, STYLE_3
from fedtar_flare.synthetic.styles_4_to_6 import STYLE_4, STYLE_5, STYLE_6
from fedtar_flare.synthetic.vocabulary import KINDS

Phase = Literal["before", "after"]

STYLES: tuple[tuple[Wording, Wording], ...] = (STYLE_1, STYLE_2, STYLE_3, STYLE_4, STYLE_5, STYLE_6)
"""Each style's wording before and after the planted change."""

GENERIC = Wording(
    opening=("Findings on this chest study are as follows.", "Findings on this chest study are as follows."),
    sections=(
        (("effusion", "pneumothorax"), "Both pleural spaces are dry."),
        (("cardiomegaly", "pericardial_effusion"), "Cardiac size lies within normal limits."),
        (("consolidation", "nodule", "emphysema", "cavity", "fibrosis"), "Aeration of both lungs is normal."),
        (("lymphadenopathy",), "Mediastinal nodes are of normal size."),
        ((BONES,), ""),
    ),
    found=per_kind(
        "The {side} pleural space contains {size} effusion{change}.",
        "The {side} lung contains {size} consolidation{change}.",
        "The {side} lung contains one {size} nodule{change}.",
        "Emphysema of {size} degree involves both lungs{change}.",
        "Cardiomegaly of {size} degree is demonstrated{change}.",
        "Lymphadenopathy of {size} degree involves the mediastinum{change}.",
        "The {side} pleural space contains {size} pneumothorax{change}.",
        "One lung contains one {size} cavity{change}.",
        "Fibrosis of {size} degree involves both lungs{change}.",
        "The pericardial space contains {size} pericardial effusion{change}.",
    ),
    sizes=per_kind(*["small|moderate|large"] * 3, *["mild|moderate|severe"] * 3, *["small|moderate|large"] * 4),
    changes=" as a new finding| with growth| with reduction",
    resolved="Gone since the earlier study: {names}.",
    bones=("", ""),
)
"""The style of the warm start; never a site's, and without anything that the image does not show."""


def style_of(site: str) -> int:
    """Style of a site, 1 to 6: by the number that its name ends with (``site-2``: 2, ``site-8``: 2), else by a hash."""
    number = re.search(r"(\d+)$", site)
    value = int(number[1]) - 1 if number else int.from_bytes(hashlib.sha256(site.encode()).digest()[:8], "big")
    return value % len(STYLES) + 1


def wording_of(style: int, phase: Phase, own_words: float = 1.0) -> Wording:
    """The wording of a style, with ``own_words`` (0 to 1) of the kinds in its own words and the others in style 1's.

    Raises:
        ConfigError: for a style outside 1 to 6.
    """
    if not 1 <= style <= len(STYLES):
        raise ConfigError(f"reporting style {style} does not exist; styles are 1 to {len(STYLES)}")
    own, common = STYLES[style - 1][phase == "after"], STYLES[0][phase == "after"]
    if own_words >= 1:
        return own
    kept = {kind for i, kind in enumerate(KINDS) if int((i + 1) * own_words) > int(i * own_words)}  # evenly spread
    found, sizes = (
        {kind: (mine if kind in kept else others)[kind] for kind in KINDS}
        for mine, others in ((own.found, common.found), (own.sizes, common.sizes))
    )
    return replace(own if own_words >= 0.5 else common, found=found, sizes=sizes)
