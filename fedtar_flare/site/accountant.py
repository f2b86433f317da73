"""The account of Gaussian releases: exact composition, and a ledger on disk that accumulates across runs and restarts.

A release of L2 sensitivity S under Gaussian noise of standard deviation z S is mu-GDP with mu = 1/z. Such releases
compose exactly to mu = sqrt(sum 1/z_i^2), also when chosen adaptively (Dong, Roth and Su, *Gaussian Differential
Privacy*, 2022, Corollary 3.3), and delta(epsilon) = Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu)
(Balle and Wang 2018, Theorem 8). Sampling amplifies nothing here: every visit of a step takes part in its update.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import write_json

FILE = "privacy_ledger.json"
PATIENT_FILE = "patient_privacy_ledger.json"
PATIENT_DELTA = 1e-5

_Multiplier = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_PATIENT_RUNS = TypeAdapter(dict[str, list[tuple[_Multiplier, _Multiplier, Annotated[int, Field(ge=1)]]]])


class _Content(BaseModel):
    """Content of a :class:`Ledger`'s file."""

    format: Literal[1]
    runs: dict[str, dict[_Multiplier, Annotated[int, Field(ge=1, strict=True)]]]


def delta_of(epsilon: float, mu: float) -> float:
    """delta at this epsilon of a mu-GDP mechanism."""
    from scipy.special import log_ndtr, ndtr  # a site without a privacy filter, and the doctor, need none of it

    if mu == 0:
        return 0.0
    high, low = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    return max(0.0, float(ndtr(high)) - math.exp(epsilon + float(log_ndtr(low))))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest epsilon with delta(epsilon) <= delta in (0, 1), rounded up by less than 1e-9 of it."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta must lie between 0 and 1, not {delta}")
    if delta_of(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of(high, mu) > delta:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle, mu) > delta else (low, middle)
    return high


@dataclass(frozen=True)
class Spent:
    """A ledger's balance: ``epsilon`` spent so far at ``delta``, and the number of releases."""

    epsilon: float
    delta: float
    releases: int


class Ledger:
    """The releases of one site by run and noise multiplier, in one JSON file, written before each message leaves.

    All runs count together, as they speak of the same patients; at a simulated site only those of the run ``scope``.
    """

    def __init__(self, file: Path, scope: str | None = None):
        self.file, self.scope = file, scope
        content: _Content | None = _read(file, TypeAdapter(_Content))
        self._runs = content.runs if content else {}

    def spent(self, delta: float, planned: Iterable[float] = ()) -> Spent:
        """Compute what is spent, or would be after further releases with the noise multipliers ``planned``."""
        releases = Counter(planned)
        for run, counts in self._runs.items():
            if self.scope in (None, run):
                releases.update(counts)
        mu = math.sqrt(sum(count / multiplier**2 for multiplier, count in sorted(releases.items())))
        return Spent(epsilon_of(mu, delta), delta, releases.total())

    def add(self, run: str, multiplier: float) -> None:
        """Count one release and write the file before returning."""
        counts = self._runs.setdefault(run, {})
        counts[multiplier] = counts.get(multiplier, 0) + 1
        runs = {name: {repr(z): count for z, count in sorted(of_run.items())} for name, of_run in self._runs.items()}
        _write(self.file, {"format": 1, "runs": runs})


class PatientLedger:
    """Updates of per-patient DP-SGD of one site by run, like a :class:`Ledger`'s releases; the unit is the patient."""

    def __init__(self, file: Path, scope: str | None = None):
        self.file, self.scope = file, scope
        self._runs: dict[str, list[tuple[float, float, int]]] = _read(file, _PATIENT_RUNS) or {}

    def epsilon_with(self, multiplier: float, rate: float, updates: int) -> float:
        """Give epsilon at :data:`PATIENT_DELTA` after further updates (sampled Gaussian, opacus's Renyi accountant)."""
        try:
            from opacus.accountants import RDPAccountant
        except ModuleNotFoundError as error:
            text = "training.noise_multiplier needs opacus at the site: install fedtar_flare[privacy]"
            raise ConfigError(text, public=text) from error
        counted = Counter({(multiplier, rate): updates})
        for run, entries in self._runs.items():
            for z, q, steps in entries if self.scope in (None, run) else ():
                counted[z, q] += steps
        accountant = RDPAccountant()
        accountant.history = [(z, q, steps) for (z, q), steps in counted.items()]
        return float(accountant.get_epsilon(PATIENT_DELTA))

    def spent(self, run: str) -> float | None:
        """Give epsilon of all updates that count; None where this run made none."""
        entries = self._runs.get(run)
        return self.epsilon_with(*entries[0][:2], updates=0) if entries else None

    def add(self, run: str, multiplier: float, rate: float, updates: int) -> None:
        """Count updates and write the file before returning."""
        self._runs.setdefault(run, []).append((multiplier, rate, updates))
        _write(self.file, self._runs)


def _read(file: Path, form: TypeAdapter[Any]) -> Any:
    try:
        return form.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        text = f"{file}: the privacy ledger cannot be read ({error}); restore it: a new one would forget what was spent"
        raise FedTARError(text, public="the site's privacy ledger cannot be read") from error


def _write(file: Path, content: Mapping[str, Any]) -> None:
    try:
        write_json(file, content)
    except OSError as error:
        text = f"{file}: the privacy ledger cannot be written ({error}), so nothing leaves"
        raise FedTARError(text, public="the site's privacy ledger cannot be written") from error
