"""Which style a site writes in, and the generic style of the warm start.

Styles say the same in different words, order and structure. Every house has two wordings; the second is what it
changes to at the planted step (``CohortOptions.change``). The generic style belongs to no house: a model that was
warm-started on it knows the findings, but still has to learn every house's way of writing.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal

from fedtar_flare.errors import ConfigError
from fedtar_flare.synthetic.reports import BONES, SHORT_NAMES, Wording, per_kind
from fedtar_flare.synthetic.styles_1_to_3 import HOUSE_1, HOUSE_2, HOUSE_3
from fedtar_flare.synthetic.styles_4_to_6 import HOUSE_4, HOUSE_5, HOUSE_6

Regime = Literal["before", "after"]

HOUSES: tuple[tuple[Wording, Wording], ...] = (HOUSE_1, HOUSE_2, HOUSE_3, HOUSE_4, HOUSE_5, HOUSE_6)
"""Per house the wording before and after the planted change."""

GENERIC = Wording(
    opening=("Findings on this chest study are as follows.", "Findings on this chest study are as follows."),
    sections=(
        (("effusion",), "Both pleural spaces are dry."),
        (("cardiomegaly",), "Cardiac size lies within normal limits."),
        (("consolidation", "nodule", "emphysema"), "Aeration of both lungs is normal."),
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
    ),
    sizes=per_kind(*["small|moderate|large"] * 3, *["mild|moderate|severe"] * 3),
    changes=" as a new finding| with growth| with reduction",
    names=SHORT_NAMES,
    resolved="Gone since the earlier study: {names}.",
    bones=("", ""),
)
"""The style of the warm start; never a site's, and without anything that the image does not show."""


def house_of(site: str) -> int:
    """House of a site, 1 to 6: by the number that its name ends with (``site-2``: 2, ``site-8``: 2), else by a hash."""
    number = re.search(r"(\d+)$", site)
    value = int(number[1]) - 1 if number else int.from_bytes(hashlib.sha256(site.encode()).digest()[:8], "big")
    return value % len(HOUSES) + 1


def wording_of(house: int, regime: Regime) -> Wording:
    """The wording of a house.

    Raises:
        ConfigError: for a house outside 1 to 6.
    """
    if not 1 <= house <= len(HOUSES):
        raise ConfigError(f"house style {house} does not exist; styles are 1 to {len(HOUSES)}")
    return HOUSES[house - 1][regime == "after"]
