"""The feature bank: rows of each hospital's image features, with which all others contrast their own images.

A row is the unit mean of the features of g training patients, of one visit each. The patients of a row stay together
for the whole run, and at a hospital those of its smallest cell in all jobs' rows, until any visit is another and all
groups are drawn anew: so no two rows differ in one patient.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtar_flare.core.draws import orders
from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.data.cohort import Sample
from fedtar_flare.metrics.classification import auc
from fedtar_flare.protocol.exchange import check_unit_rows

FEATURES = "bank.features"
"""Name of the rows on the wire."""
SENT = "sent/"
"""Prefix, in the site's private state, of the rows that it sent; the round follows."""
ROUNDS = 3
"""Rounds in which a site's rows are used, unless newer rows of the site replace them."""
MOST_ROWS, WIDEST, MOST_DOWN = 64, 4096, 100_000
"""Most rows of a site in a round, largest width of a row, and most rows that a site takes from the server."""


def rows_of_round(samples: Sequence[Sample], round_: int, rows: int, group: int, seed: int) -> list[list[Sample]]:
    """Choose the samples of at most ``rows`` rows of a round (from 1), each one visit of ``group`` patients.

    In an order by ``seed`` each row is used once before any is used again, then with the next visit of all its
    patients, if all have one: a row in which one patient alone had another visit would tell that visit.
    """
    of_patient: dict[str, list[Sample]] = {}
    for sample in samples:
        of_patient.setdefault(sample.visit.patient_id, []).append(sample)
    patients = list(of_patient.values())
    groups = [patients[i : i + group] for i in range(0, len(patients) - group + 1, group)]
    count = min(rows, len(groups))
    if not count:
        return []
    cycle, part = divmod(round_ - 1, len(groups) // count)
    order = next(orders(len(groups), seed + cycle))
    chosen = order[part * count : (part + 1) * count]
    return [[visits[cycle % min(map(len, groups[i]))] for visits in groups[i]] for i in chosen]


def membership_auc(rows: Tensor, inside: Tensor, outside: Tensor) -> float:
    """AUC of guessing by the largest cosine to any row (M, C), given the image and encoder, who is ``inside`` it."""
    scores = torch.cat([inside, outside]) @ rows.T
    value = auc(np.repeat([1, 0], [len(inside), len(outside)]), scores.amax(1).numpy())
    assert value is not None
    return value


class SiteBank:
    """The bank at one site: :attr:`rows` (M, C) are other hospitals' unit rows, :attr:`sent` its own by round."""

    def __init__(self, width: int):
        self.width = width
        self.rows = torch.zeros(0, width)
        self.sent: dict[int, Tensor] = {}
        self.use: dict[str, float] = {}

    def receive(self, rows: Tensor | None) -> None:
        """Replace the rows by those that came down, which must be unit rows of this width."""
        rows = torch.zeros(0, self.width) if rows is None else rows
        if rows.dim() != 2 or rows.shape[1] != self.width or len(rows) > MOST_DOWN:
            raise ExchangeError(f"the server sent a bank of shape {tuple(rows.shape)}, not rows of {self.width}")
        check_unit_rows(FEATURES, rows)
        self.rows = rows.clone()

    def begin(self, round_: int) -> None:
        """Drop sent rows that are too old to be in the bank, and remove the site's own rows from the bank."""
        self.sent = {r: rows for r, rows in self.sent.items() if 0 < round_ - r <= ROUNDS}
        if self.sent and len(self.rows):
            sent = torch.cat(list(self.sent.values()))
            self.rows = self.rows[~(self.rows[:, None] == sent[None]).all(-1).any(1)]
        self.use = {"sent": 0.0, "received": float(len(self.rows))}

    def share(self, inside: Tensor, group: int, round_: int) -> Tensor:
        """Rows (M, C) to send, added to :attr:`sent`: the unit mean of each group of unit features (M * group, C)."""
        shared = F.normalize(inside.unflatten(0, (-1, group)).mean(1), dim=-1)
        self.sent[round_] = shared
        self.use |= {"sent": float(len(shared)), "patients_a_row": float(group)}
        return shared

    def state(self) -> dict[str, Tensor]:
        return {f"{SENT}{round_}": rows for round_, rows in self.sent.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state` gave; other names are ignored."""
        self.sent = {int(name.removeprefix(SENT)): v.clone() for name, v in state.items() if name.startswith(SENT)}


class FeatureBank:
    """The rows at the server; those of round q are used in the rounds q + 1 to q + :data:`ROUNDS`."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, Tensor]] = {}

    def put(self, site: str, round_: int, rows: Tensor) -> None:
        """Replace a site's rows by those of a round."""
        self._rows[site] = (round_, rows.clone())

    def rows(self, round_: int) -> Tensor | None:
        """All rows that are used in a round, in the order of values, which hides their sites; None without any."""
        self._rows = {site: sent for site, sent in self._rows.items() if round_ - sent[0] <= ROUNDS}
        if not self._rows:
            return None
        rows = torch.cat([self._rows[site][1] for site in sorted(self._rows)])
        return rows[torch.argsort(rows[:, 0], stable=True)]  # a shuffle by the job's seed could be undone by every site

    def state(self) -> dict[str, Tensor]:
        return {f"bank/{sent}/{site}": rows for site, (sent, rows) in sorted(self._rows.items())}

    def load(self, state: Mapping[str, Tensor]) -> None:
        names = {name: name.split("/", 2) for name in sorted(state)}
        self._rows = {site: (int(sent), state[name]) for name, (_, sent, site) in names.items()}
