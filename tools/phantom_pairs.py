"""Images with reports for the warm start of a model, in memory.

A warm-started model should know how findings look and how radiology reads, and no more: what a site teaches it must
stay visible. So these pairs differ from every site's data in three ways: reports are in the generic style and in styles
drawn one by one, none of them a site's (a model that knows one wording alone forgets to look while it learns
another); no text tells of age or sex; and patients, scanners and noise are drawn from other random streams, over ranges
that enclose those of the sites. Findings, degrees and changes are evenly frequent, unlike a site's.

No image shows a new finding, and no report on one speaks of any: the model meets their words in the texts without
images (``corpus``) alone. It can spell them; the tie from image to word is what is left to learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedtar_flare.synthetic.course import MOST_FINDINGS, stream
from fedtar_flare.synthetic.phantom import KERNELS, Scanner, draw_anatomy, render, scanner_of
from fedtar_flare.synthetic.reports import GENERIC, Change, State, write_report
from fedtar_flare.synthetic.vocabulary import KNOWN_FINDINGS
from tools.corpus import styled_report

OTHER_SCANNER = 0.2
"""Share of visits with a scanner of their own."""


class Phantom(NamedTuple):
    """A volume (int16 HU, (z, y, x)), its spacing in mm (z, y, x), reports on it, and what they state.

    ``reports`` are in the generic style and in one of their own and tell of the image alone; ``compared`` tell of the
    changes since the visit before too, and are None at a first visit.
    """

    hu: np.ndarray
    spacing_mm: tuple[float, float, float]
    reports: tuple[str, str]
    compared: tuple[str, str] | None
    states: Mapping[str, State]

    @property
    def findings(self) -> frozenset[str]:
        """Findings that the image shows."""
        return frozenset(self.states)


def random_scanner(rng: np.random.Generator) -> Scanner:
    """A scanner from ranges that enclose all those of the sites."""
    return scanner_of(
        view_mm=float(rng.uniform(340, 392)),
        slices=int(rng.integers(22, 27)),
        kernel=str(rng.choice(sorted(KERNELS))),
        offset=float(rng.uniform(-14, 14)),
        contrast=float(rng.uniform(110, 165)),
    )


def phantom_patients(n: int, seed: int, names: Sequence[str] = KNOWN_FINDINGS) -> Iterator[tuple[Phantom, Phantom]]:
    """Patients with two visits each: at the second a finding is as it was, one size larger or smaller, gone or new.

    Parameters
    ----------
    n : int
        Number of patients; patient i is the same whatever n is.
    seed : int
        Of a stream of its own, never a site's, whatever the number.
    names : sequence of str
        The findings to draw from.
    """
    for i in range(n):
        rng = stream("warm start", seed, i)
        anatomy, scanner = draw_anatomy(rng), random_scanner(rng)
        first = {
            str(name): int(rng.integers(1, 4)) for name in _drawn(rng, names, int(rng.integers(MOST_FINDINGS + 1)))
        }
        second = {name: min(size + int(rng.integers(-1, 2)), 3) for name, size in first.items()}
        second = {name: size for name, size in second.items() if size}
        others = [name for name in names if name not in first]
        for name in _drawn(rng, others, min(int(rng.integers(2)), MOST_FINDINGS - len(second))):
            second[name] = int(rng.integers(1, 4))
        phantoms = []
        for number, sizes in enumerate((first, second)):
            states = {name: State(sizes[name], _change(first, sizes, name, number)) for name in names if name in sizes}
            resolved = [name for name in names if name in first and name not in sizes]
            if rng.random() < OTHER_SCANNER:
                scanner = random_scanner(rng)
            hu = render(anatomy, {name: state.size for name, state in states.items()}, scanner, rng)
            style = ("warm start style", seed, i, number)
            alone = {name: State(state.size) for name, state in states.items()}
            reports = write_report(GENERIC, alone), styled_report(stream(*style), alone)
            compared = None
            if number:
                generic = write_report(GENERIC, states, resolved=resolved, follow_up=True)
                compared = generic, styled_report(stream(*style, "compared"), states, resolved)
            phantoms.append(Phantom(hu, scanner.spacing_mm, reports, compared, states))
        yield phantoms[0], phantoms[1]


def _drawn(rng: np.random.Generator, names: Sequence[str], count: int) -> list[str]:
    """``count`` of the names, in their order."""
    chosen = set(rng.permutation(len(names))[:count].tolist())
    return [name for i, name in enumerate(names) if i in chosen]


def _change(first: Mapping[str, int], now: Mapping[str, int], name: str, number: int) -> Change:
    """What became of a finding by visit ``number``."""
    if not number or name not in first:
        return "new" if number else "first"
    return "larger" if now[name] > first[name] else "smaller" if now[name] < first[name] else "stable"
