"""Whether a reconstruction kernel is meant for soft tissue, by the manufacturers' naming."""

from __future__ import annotations

import re

SHARP_WORDS = ("LUNG", "BONE", "EDGE", "SHARP", "DETAIL", "ULTRA", "HRCT", "CHEST")
SOFT_WORDS = ("STANDARD", "SOFT", "SMOOTH", "BODY", "STND", "MEDIASTIN")


def softness(kernel: str) -> int:
    """0 soft tissue, 1 unknown, 2 sharp (lung, bone).

    Siemens: B31f, Br40d, I41f are soft below 50, sharp from there. Canon: FC01 to FC29 soft, FC30 and above sharp.
    Philips: A, B, C soft; D, E, L and Y.. sharp. GE: words.

    >>> [softness(k) for k in ("B31f", "Br64d", "FC08", "FC51", "B", "L", "STANDARD", "LUNG", "")]
    [0, 2, 0, 2, 0, 2, 0, 2, 1]
    """
    name = kernel.upper().strip()
    if any(word in name for word in SHARP_WORDS):
        return 2
    if any(word in name for word in SOFT_WORDS):
        return 0
    if canon := re.match(r"FC(\d\d)", name):
        return 0 if int(canon[1]) < 30 else 2
    if siemens := re.match(r"[A-Z]{1,2}(\d\d)", name):
        return 0 if int(siemens[1]) < 50 else 2
    if philips := re.fullmatch(r"([A-E]|L|Y[A-D])", name):
        return 0 if philips[1] in "ABC" else 2
    return 1
