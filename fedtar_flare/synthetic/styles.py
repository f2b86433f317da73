"""The reporting style of a site, and the generic style of the warm start.

Styles say the same in different words, order and structure. Each has two wordings, one before and one after the planted
change (``CohortOptions.change``). The generic style belongs to no site: a model that was warm-started on it knows the
findings, but still has to learn how each site writes. All are in ``styles.yaml``.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtar_flare.core.files import read_yaml
from fedtar_flare.synthetic.reports import Wording
from fedtar_flare.synthetic.vocabulary import KINDS


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


def wording_of(style: int, share: float, own_words: float = 1.0) -> Wording:
    """The wording of a style (1 to 6).

    ``share`` of the kinds of finding are in its second wording (0: before the planted change, 1: after it), and
    ``own_words`` of them in the words of the style, the others in those of style 1.
    """
    common, site = (_mixed(*STYLES[number - 1], share) for number in (1, style))
    return _mixed(common, site, own_words)


def _mixed(first: Wording, second: Wording, share: float) -> Wording:
    """A share of the kinds in the second's words, the others in the first's; under 0.5 all else is the first's."""
    if share in (0, 1):
        return second if share else first
    from_second = {kind for i, kind in enumerate(KINDS) if int((i + 1) * share) > int(i * share)}  # evenly spread
    sentences, sizes = (
        {kind: (mine if kind in from_second else others)[kind] for kind in KINDS}
        for mine, others in ((second.sentences, first.sentences), (second.sizes, first.sizes))
    )
    return replace(second if share >= 0.5 else first, sentences=sentences, sizes=sizes)
