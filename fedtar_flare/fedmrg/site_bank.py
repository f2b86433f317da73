"""A site's end of the feature bank: the other hospitals' rows, the rows that it sent, and what is told of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedtar_flare.fedmrg.bank import ROUNDS, check_down, membership_auc, others
from fedtar_flare.fedmrg.contrast import unit

SENT = "sent/"
"""Of the names of the rows that the site sent, by round, in its private state."""


class SiteBank:
    """The bank as one site has it.

    :attr:`rows` (M, C) are the other hospitals' unit rows for the contrast, :attr:`sent` by round the rows that this
    site sent, which are part of its state, :attr:`use` what is told of both. ``width`` is C.
    """

    def __init__(self, width: int):
        self.width = width
        self.rows = torch.zeros(0, width)
        self.sent: dict[int, Tensor] = {}
        self.use: dict[str, float] = {}

    def receive(self, rows: Tensor | None) -> None:
        """Take what came down, in place of what was there; :class:`ExchangeError` for what is no bank."""
        if rows is not None:
            check_down(rows, self.width)
        self.rows = torch.zeros(0, self.width) if rows is None else rows.clone()

    def begin(self, round_: int) -> None:
        """Forget what was sent too long ago to be in the bank, and leave out of the bank what this site sent."""
        self.sent = {r: kept for r, kept in self.sent.items() if 0 < round_ - r <= ROUNDS}
        self.rows = others(self.rows, list(self.sent.values()))
        self.use = {"sent": 0.0, "received": float(len(self.rows))}

    def share(self, inside: Tensor, group: int, round_: int) -> Tensor:
        """Rows (M, C) of unit features (M * group, C), kept as sent: the unit mean of each group."""
        shared = unit(inside.unflatten(0, (-1, group)).mean(1))
        self.sent[round_] = shared
        self.use |= {"sent": float(len(shared)), "patients_a_row": float(group)}
        return shared

    def tell_membership(self, shared: Tensor, inside: Tensor, outside: Tensor) -> None:
        """How well the rows tell features of who is in them from features of others, for :attr:`use`."""
        self.use["membership_auc"] = membership_auc(shared, inside, outside)

    def state(self) -> dict[str, Tensor]:
        """What persists at the site."""
        return {f"{SENT}{round_}": rows for round_, rows in self.sent.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state` gave; other names are ignored."""
        self.sent = {int(name.removeprefix(SENT)): v.clone() for name, v in state.items() if name.startswith(SENT)}
