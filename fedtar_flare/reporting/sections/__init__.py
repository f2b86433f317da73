"""The sections of every run's page, in order."""

from __future__ import annotations

from fedtar_flare.reporting.section import MakeSection
from fedtar_flare.reporting.sections.examples import examples
from fedtar_flare.reporting.sections.exchange import exchange
from fedtar_flare.reporting.sections.losses import losses
from fedtar_flare.reporting.sections.movement import movement
from fedtar_flare.reporting.sections.participation import participation
from fedtar_flare.reporting.sections.scores import scores
from fedtar_flare.reporting.sections.settings import settings
from fedtar_flare.reporting.sections.visits import visits

SECTIONS: tuple[MakeSection, ...] = (
    losses,
    scores,
    examples,
    participation,
    movement,
    exchange,
    visits,
    settings,
)
