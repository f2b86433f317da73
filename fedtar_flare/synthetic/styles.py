"""Which reporting style a site has, and the generic style of the warm start.

Styles say the same in different words, order and structure. Each has two wordings, one before and one after the planted
change (``CohortOptions.change``). The generic style belongs to no site: a model that was warm-started on it knows the
findings, but still has to learn how each site writes. All are in ``styles.yaml``.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fedtar_flare.errors import ConfigError
from fedtar_flare.files import read_yaml
from fedtar_flare.synthetic.reports import Wording
from fedtar_flare.synthetic.vocabulary import KINDS

Phase = Literal["before", "after"]


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


def wording_of(style: int, phase: Phase, own_words: float = 1.0) -> Wording:
    """The wording of a style (1 to 6), with a share of the kinds in its own words and the others in style 1's."""
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
