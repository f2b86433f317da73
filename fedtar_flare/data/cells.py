"""The cell of a visit: the split of its patient, by keyed hash of the identifier, and its time step.

Plain hashes can be inverted by trying identifiers; HMAC-SHA-256 with a key that stays at the site cannot. A split
depends on identifier and key alone, so a new visit never moves a patient, unless its picture is another patient's too
(:class:`.cohort.Cohort`), or the source states a split.
"""

import hashlib
import hmac
from bisect import bisect_right
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from fedtar_flare.core.errors import ConfigError, DataError
from fedtar_flare.core.files import read_text

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
FRACTIONS = (0.7, 0.1, 0.2)  # train, validation, test
ALIGNMENTS = ("visit", "period")
PRIORS = ("none", "report", "image", "report+image", "generated", "generated+image")
Member = TypeVar("Member", bound=Hashable)


def keyed_unit(text: str, key: bytes) -> float:
    """HMAC-SHA-256 of a text as a uniform number in [0, 1) of 53 bits; ConfigError for a key under 16 bytes."""
    if len(key) < 16:
        raise ConfigError("the site's hash key must have at least 16 bytes")
    return (int.from_bytes(hmac.digest(key, text.encode(), "sha256")[:8], "big") >> 11) / 2**53


def split_of(patient_id: str, key: bytes) -> Split:
    """Draw a patient's split with the probabilities :data:`FRACTIONS`, by keyed hash."""
    drawn = keyed_unit(f"split:{patient_id}", key)
    if drawn < FRACTIONS[0]:
        return "train"
    return "validation" if drawn < FRACTIONS[0] + FRACTIONS[1] else "test"


def patient_digest(patient_id: str, key: bytes) -> str:
    """Name a patient in the record of a warm start's training data; nobody without the key knows who it is."""
    return hmac.digest(key, f"trained on:{patient_id}".encode(), "sha256")[:8].hex()


def synthetic_key(seed: int, site: str) -> bytes:
    """Key of a synthetic site; no secret, unlike a real site's."""
    return hashlib.sha256(f"fedtar synthetic site\x1f{seed}\x1f{site}".encode()).digest()


def read_key(file: Path) -> bytes:
    """Read a site's key."""
    try:
        key = bytes.fromhex(read_text(file).strip())
        if len(key) < 16:
            raise ValueError("too short")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is no key that can be read; restore it from its backup", reason="bad-key") from error
    return key


def linked(pairs: Iterable[tuple[Member, Member]]) -> list[set[Member]]:
    """Join pairs to groups, also by way of a third, in the order in which a member of each first comes."""
    group_of: dict[Member, set[Member]] = {}
    for pair in pairs:
        few, many = sorted((group_of.setdefault(member, {member}) for member in pair), key=len)
        if few is not many:
            many |= few
            group_of |= dict.fromkeys(few, many)
    return list({id(group): group for group in group_of.values()}.values())


def key_check(key: bytes) -> str:
    """A short value to compare keys by, which reveals nothing of the key."""
    return hmac.digest(key, b"fedtar key check", "sha256")[:8].hex()


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time steps 1 to T of a run, and what a sample includes of earlier visits."""

    time_steps: int
    alignment: str = "visit"
    """``visit``: a patient's t-th visit by date is at step t, all beyond T at step T; ``period``: calendar bins."""
    periods: tuple[datetime, ...] = ()  # for ``period``, T - 1 rising dates, each in the bin that it begins
    prior: str = "none"
    """Part of the previous visit that a sample includes. ``generated`` is the report in training and in the validation
    loss, and the model's own draft of that visit when reports are generated."""
    priors: int = 1  # number of earlier visits that a sample includes

    def __post_init__(self) -> None:
        whole = isinstance(self.time_steps, int) and not isinstance(self.time_steps, bool)
        if not whole or self.time_steps < 1:
            raise ConfigError(f"time_steps must be a whole number of at least 1, not {self.time_steps!r}")
        for name, value, known in (("alignment", self.alignment, ALIGNMENTS), ("prior", self.prior, PRIORS)):
            if value not in known:
                raise ConfigError(f"{name} '{value}' is not one of {', '.join(known)}")
        object.__setattr__(self, "periods", tuple(self.periods))
        rising = list(self.periods) == sorted(set(self.periods))
        if self.alignment == "period" and (len(self.periods) != self.time_steps - 1 or not rising):
            text = f"alignment 'period' needs {self.time_steps - 1} rising dates as periods"
            raise ConfigError(f"{text}, not {[date.isoformat() for date in self.periods]}")

    @property
    def prior_kinds(self) -> frozenset[str]:
        """Parts of the previous visit that a sample includes: ``report``, ``image``, both, or none."""
        return frozenset(self.prior.replace("generated", "report").split("+")) - {"none"}

    @property
    def prior_generated(self) -> bool:
        """Whether the model's own draft takes the place of the previous report when reports are generated."""
        return "generated" in self.prior

    def step_of(self, before: int, acquired: datetime) -> int:
        """Time step of a visit with this number of visits before it."""
        if self.alignment == "period":
            return bisect_right(self.periods, acquired) + 1
        return min(before + 1, self.time_steps)


def extends(before: str, now: str) -> list[str]:
    """The dates by which a timeline of calendar bins continues another one.

    >>> extends("period 2019-04-01", "period 2019-04-01 2019-07-01")
    ['2019-07-01']
    """
    return now.removeprefix(before).split() if before.startswith("period") and now.startswith(f"{before} ") else []
