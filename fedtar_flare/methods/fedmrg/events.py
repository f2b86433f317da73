"""FedMRG's own events of the record: who only is scored, the parts of the losses, predicted prompts, and the bank."""

from typing import ClassVar

from fedtar_flare.record.events import Event


class Outside(Event):
    """Sites that never train, of whom all patients are scored."""

    kind: ClassVar[str] = "outside"
    sites: list[str] = []


class LossParts(Event):
    """Parts of the training loss in a round: site to part to its mean over the local updates."""

    kind: ClassVar[str] = "loss_parts"
    round: int
    sites: dict[str, dict[str, float]] = {}


class Diagnoses(Event):
    """How well the prompts are predicted after a round: site to finding to ``n``, ``recall`` and ``accuracy``."""

    kind: ClassVar[str] = "diagnoses"
    round: int
    sites: dict[str, dict[str, dict[str, float]]] = {}


class Bank(Event):
    """The feature bank in a round: rows that went down, the age in rounds of the oldest, and what each site says."""

    kind: ClassVar[str] = "bank"
    round: int
    rows: int = 0
    oldest: int | None = None
    sites: dict[str, dict[str, float]] = {}


EVENTS = (Outside, LossParts, Diagnoses, Bank)
