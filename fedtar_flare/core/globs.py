"""Globs: how jobs, sites and contracts pick layers and tensors by name.

``*`` stands for any text, ``?`` for a character, ``[ab]`` for one of these, and ``!`` before a glob takes out what it
matches. A glob must match the whole name. Matching takes a time that is bounded by the product of both lengths
(:mod:`fnmatch` never comes back to an earlier ``*``); a regular expression of a job could hold a site for ever.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

MOST, LONGEST = 200, 300
"""Globs in a list, and characters of one."""
_PART = r"(?:[A-Za-z0-9_?*-]|\[!?[A-Za-z0-9_-]++\])++"
_GLOB = re.compile(rf"!?{_PART}(?:\.{_PART})*+")


def matches(name: str, globs: Sequence[str]) -> bool:
    """Whether some glob matches the name, and none takes it out.

    >>> [matches(name, ["decoder.*", "!*.bias"]) for name in ("decoder.h.weight", "decoder.h.bias")]
    [True, False]
    """
    return any(fnmatchcase(name, glob) for glob in globs) and not any(
        fnmatchcase(name, glob[1:]) for glob in globs if glob[:1] == "!"
    )


def problem_of(globs: Sequence[str], most: int = MOST) -> str | None:
    """What a list must be that is none of globs, to stand after 'it must be'; None for globs.

    >>> problem_of([r"decoder\\..*\\.c_fc"])
    "a list of names with '*' for any text, not of regular expressions: write 'decoder.*.c_fc'"
    """
    if isinstance(globs, str) or len(globs) > most:
        return f"a list of at most {most} names"
    for glob in globs:
        if len(glob) > LONGEST or not _GLOB.fullmatch(glob):
            plain = re.sub(r"\\d\+|\.[*+]", "*", glob[:LONGEST]).replace("\\", "")
            how = f"'{plain}'" if _GLOB.fullmatch(plain) else "one name for each alternative, such as 'decoder.*.c_fc'"
            return f"a list of names with '*' for any text, not of regular expressions: write {how}"
    return None
