"""Images with reports for the warm start of a model, in memory.

A warm-started model should know how findings look and how radiology reads, and no more: what a site teaches it must
stay visible. So these pairs differ from every site's data in three ways: reports are in the generic style and in styles
drawn one by one, none of them a site's (a model that knows one wording alone forgets to look while it learns
another); patients come once, so no text tells of a change, of age or of sex; and patients, scanners and noise are
drawn from other random streams, over ranges that enclose those of the sites. Findings are evenly frequent.

No image shows a new finding, and no report on one speaks of any: the model meets their words in the texts without
images (``corpus``) alone. It can spell them; the tie from image to word is what is left to learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedtar_flare.synthetic.course import MOST_FINDINGS, stream
from fedtar_flare.synthetic.phantom import KERNELS, Scanner, draw_anatomy, render, scanner_of
from fedtar_flare.synthetic.reports import GENERIC, State, write_report
from fedtar_flare.synthetic.vocabulary import KNOWN_FINDINGS
from tools.corpus import styled_report


class Pair(NamedTuple):
    """A volume (int16 HU, (z, y, x)), its spacing in mm (z, y, x), two reports on it, and what they state."""

    hu: np.ndarray
    spacing_mm: tuple[float, float, float]
    report: str
    styled: str
    findings: frozenset[str]


def random_scanner(rng: np.random.Generator) -> Scanner:
    """A scanner from ranges that enclose all those of the sites."""
    return scanner_of(
        view_mm=float(rng.uniform(340, 392)),
        slices=int(rng.integers(22, 27)),
        kernel=str(rng.choice(sorted(KERNELS))),
        offset=float(rng.uniform(-14, 14)),
        contrast=float(rng.uniform(110, 165)),
    )


def generic_pairs(n: int, seed: int, names: Sequence[str] = KNOWN_FINDINGS) -> Iterator[Pair]:
    """Volumes with a report in the generic style, and one in a style that is drawn anew for each.

    Parameters
    ----------
    n : int
        Number of pairs; pair i is the same whatever n is.
    seed : int
        Of a stream of its own, never a site's, whatever the number.
    names : sequence of str
        The findings to draw from.
    """
    for i in range(n):
        rng = stream("warm start", seed, i)
        count = int(rng.integers(0, MOST_FINDINGS + 1))
        shown = set(rng.permutation(names)[:count].tolist())
        sizes = {name: int(rng.integers(1, 4)) for name in names if name in shown}
        scanner = random_scanner(rng)
        hu = render(draw_anatomy(rng), sizes, scanner, rng)
        report = write_report(GENERIC, {name: State(size) for name, size in sizes.items()})
        styled = styled_report(stream("warm start style", seed, i), sizes)
        yield Pair(hu, scanner.spacing_mm, report, styled, frozenset(sizes))
