"""FedMRG's own events of the record: sites that are only scored, parts of the losses, the bank."""

from typing import ClassVar

from fedtar_flare.record.events import Event


class Outside(Event):
    """Sites that never train; all of their patients are scored."""

    kind: ClassVar[str] = "outside"
    sites: list[str] = []


class LossParts(Event):
    """Parts of the training loss in a round: by site and part, the mean over the local updates."""

    kind: ClassVar[str] = "loss_parts"
    round: int
    sites: dict[str, dict[str, float]] = {}


class Bank(Event):
    """The feature bank in a round: rows sent down, and numbers by site."""

    kind: ClassVar[str] = "bank"
    round: int
    rows: int = 0
    sites: dict[str, dict[str, float]] = {}


EVENTS = (Outside, LossParts, Bank)
