"""The feature bank: rows of each hospital's image features, which all others contrast their own images with.

A row is the unit mean of the features of g training patients, of one visit each. The patients of a row stay together
for the whole run, so that no difference of two rows is one patient's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.data.cohort import Sample
from fedtar_flare.metrics.classification import auc
from fedtar_flare.protocol.exchange import check_unit_rows

FEATURES = "bank.features"
"""Name of the rows on the wire."""

SENT = "sent/"
"""Of the names of the rows that the site sent, by round, in its private state."""

ROUNDS = 3
"""For how many rounds a site's rows serve, unless newer ones of its own replace them."""

MOST_ROWS, WIDEST, MOST_DOWN = 64, 4096, 100_000
"""Most rows of a site in a round, widest row, and most rows that a site takes from the server."""


def rows_of_round(samples: Sequence[Sample], round_: int, rows: int, group: int, seed: int) -> list[list[Sample]]:
    """The samples of each row of a round (from 1): at most ``rows`` of them, of one visit each of ``group`` patients.

    ``samples`` are for training, patient by patient in the site's own secret order (``Cohort.samples``). In an order by
    ``seed`` each row comes once before any comes again; every time a patient comes, it is with the next visit. Empty
    where there are fewer patients than ``group``.
    """
    visits: dict[str, list[Sample]] = {}
    for sample in samples:
        visits.setdefault(sample.visit.patient_id, []).append(sample)
    patients = list(visits.values())
    groups = [patients[i : i + group] for i in range(0, len(patients) - group + 1, group)]
    many = min(rows, len(groups))
    if not many:
        return []
    rounds_of_cycle = len(groups) // many
    cycle, place = divmod(round_ - 1, rounds_of_cycle)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed((seed + cycle) % 2**63)).tolist()
    return [[own[cycle % len(own)] for own in groups[i]] for i in order[place * many : (place + 1) * many]]


def membership_auc(rows: Tensor, inside: Tensor, outside: Tensor) -> float:
    """AUC of the largest cosine to any row, of features (n, C) of patients in the rows against (m, C) of others.

    It is what somebody can do who has the patient's image, the encoder and the rows: 1 where they give away who is in
    them, 0.5 where they tell nothing.
    """
    scores = torch.cat([inside, outside]) @ rows.T
    found = auc(np.repeat([1, 0], [len(inside), len(outside)]), scores.amax(1).numpy())
    assert found is not None
    return found


class SiteBank:
    """The bank as one site has it: :attr:`rows` (M, C), ``width`` C, are the other hospitals' unit rows.

    :attr:`sent` by round are the rows that this site sent, part of its state, :attr:`use` numbers for the record.
    """

    def __init__(self, width: int):
        self.width = width
        self.rows = torch.zeros(0, width)
        self.sent: dict[int, Tensor] = {}
        self.use: dict[str, float] = {}

    def receive(self, rows: Tensor | None) -> None:
        """Take what came down, in place of what was there; :class:`ExchangeError` where it is no bank of unit rows."""
        rows = torch.zeros(0, self.width) if rows is None else rows
        if rows.dim() != 2 or rows.shape[1] != self.width or len(rows) > MOST_DOWN:
            raise ExchangeError(f"the server sent a bank of shape {tuple(rows.shape)}, not rows of {self.width}")
        check_unit_rows(FEATURES, rows)
        self.rows = rows.clone()

    def begin(self, round_: int) -> None:
        """Forget what was sent too long ago to be in the bank, and leave out of the bank what this site sent."""
        self.sent = {r: kept for r, kept in self.sent.items() if 0 < round_ - r <= ROUNDS}
        if self.sent and len(self.rows):
            own = torch.cat(list(self.sent.values()))
            self.rows = self.rows[~(self.rows[:, None] == own[None]).all(-1).any(1)]
        self.use = {"sent": 0.0, "received": float(len(self.rows))}

    def share(self, inside: Tensor, group: int, round_: int) -> Tensor:
        """Rows (M, C) of unit features (M * group, C), kept as sent: the unit mean of each group."""
        shared = F.normalize(inside.unflatten(0, (-1, group)).mean(1), dim=-1)
        self.sent[round_] = shared
        self.use |= {"sent": float(len(shared)), "patients_a_row": float(group)}
        return shared

    def state(self) -> dict[str, Tensor]:
        """What persists at the site."""
        return {f"{SENT}{round_}": rows for round_, rows in self.sent.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state` gave; other names are ignored."""
        self.sent = {int(name.removeprefix(SENT)): v.clone() for name, v in state.items() if name.startswith(SENT)}


class FeatureBank:
    """The rows at the server; those of round q serve the rounds q + 1 to q + :data:`ROUNDS`.

    ``seed`` is of the order in which all are sent down.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed
        self._rows: dict[str, tuple[int, Tensor]] = {}

    def put(self, site: str, round_: int, rows: Tensor) -> None:
        """Keep a site's rows of a round in place of its earlier ones."""
        self._rows[site] = (round_, rows.clone())

    def rows(self, round_: int) -> Tensor | None:
        """All rows that serve in a round, without their origin; None without any."""
        self._rows = {site: kept for site, kept in self._rows.items() if round_ - kept[0] <= ROUNDS}
        found = [self._rows[site][1] for site in sorted(self._rows)]
        if not found:
            return None
        together = torch.cat(found)
        generator = torch.Generator().manual_seed((self.seed * 10_007 + round_) % 2**63)
        return together[torch.randperm(len(together), generator=generator)]

    def ages(self, round_: int) -> list[int]:
        """Rounds since each site's rows came."""
        return sorted(round_ - kept for kept, _ in self._rows.values())

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {f"bank/{kept}/{site}": rows for site, (kept, rows) in sorted(self._rows.items())}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state` gave."""
        places = {name: name.split("/", 2) for name in sorted(state)}
        self._rows = {site: (int(kept), state[name]) for name, (_, kept, site) in places.items()}
