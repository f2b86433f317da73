"""Which round was best, by validation loss."""

from __future__ import annotations

from collections.abc import Sequence

from fedtar_flare.record.events import Validation


def best_round(validations: Sequence[Validation]) -> int | None:
    """The round with the lowest validation loss; the earliest of equals, None without any loss.

    Means over different sets of sites cannot be compared, so each pair of rounds is compared on the sites that both
    have: a later round takes the place of the best so far when its loss over their common sites is lower. Rounds
    without a site in common are compared by their own means.
    """
    best: Validation | None = None
    for candidate in validations:
        if candidate.loss is None:
            continue
        if best is None or _loss(candidate, best) < _loss(best, candidate):
            best = candidate
    return best.round if best else None


def _loss(validation: Validation, other: Validation) -> float:
    """Mean loss over the reports of the sites that both have."""
    known = {name: site for name, site in validation.sites.items() if site.validation_loss is not None and site.n}
    common = [name for name in sorted(known) if (there := other.sites.get(name)) and there.validation_loss is not None]
    if not common:
        return validation.loss if validation.loss is not None else float("inf")
    reports = sum(known[name].n for name in common)
    return sum((known[name].validation_loss or 0.0) * known[name].n for name in common) / reports
