"""Globs: how jobs, sites and contracts pick layers and tensors by name.

``*`` stands for any text, ``?`` for a character, ``[ab]`` for one of these characters, and ``!`` before a glob excludes
what it matches. A glob must match the whole name. Matching takes a time that is bounded by the product of both lengths
(:mod:`fnmatch` never comes back to an earlier ``*``); a regular expression of a job could keep a site busy for ever.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

MAX_GLOBS, MAX_LENGTH = 200, 300
"""Globs in a list, and characters of a glob."""
_PART = r"(?:[A-Za-z0-9_?*-]|\[!?[A-Za-z0-9_-]++\])++"
_GLOB = re.compile(rf"!?{_PART}(?:\.{_PART})*+")


def matches(name: str, globs: Sequence[str]) -> bool:
    """Tell whether some glob matches a name and no glob excludes it."""
    matched = False
    for glob in globs:
        if glob[:1] != "!":
            matched = matched or fnmatchcase(name, glob)
        elif fnmatchcase(name, glob[1:]):
            return False
    return matched


def problem_of(globs: Sequence[str], most: int = MAX_GLOBS) -> str | None:
    """Check a list of globs."""
    if isinstance(globs, str) or len(globs) > most:
        return f"a list of at most {most} names"
    for glob in globs:
        if len(glob) > MAX_LENGTH or not _GLOB.fullmatch(glob):
            plain = re.sub(r"\\d\+|\.[*+]", "*", glob[:MAX_LENGTH]).replace("\\", "")
            how = f"'{plain}'" if _GLOB.fullmatch(plain) else "one name for each alternative, such as 'decoder.*.c_fc'"
            return f"a list of names with '*' for any text, not of regular expressions: write {how}"
    return None
