"""The best round by validation loss, comparing like with like."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedtar_flare.record.events import Validation


def best_round(validations: Iterable[Validation]) -> int | None:
    """The round whose weights are to be kept; None where no site has a validation loss.

    Means over different sites cannot be compared. So each round is compared with the best one before it on the sites
    that both have, by the mean of their losses weighted by the later round's number of reports. The lower mean wins;
    the earlier round wins a tie, and the later one wins where no site is shared. Of a repeated round the later entry
    counts.

    A new round either becomes the best or leaves the best unchanged, so weights that were not kept are never needed.
    """
    best: Validation | None = None
    for later in sorted({one.round: one for one in validations}.values(), key=lambda one: one.round):
        if _losses(later) and (best is None or _better(later, best)):
            best = later
    return None if best is None else best.round


def _better(later: Validation, best: Validation) -> bool:
    new, old = _losses(later), _losses(best)
    shared = sorted(new.keys() & old.keys())
    reports = {site: max(1, later.sites[site].n) for site in shared}
    mean_new, mean_old = (sum(losses[site] * reports[site] for site in shared) for losses in (new, old))
    return not shared or mean_new < mean_old


def _losses(one: Validation) -> dict[str, float]:
    return {
        site: part.validation_loss
        for site, part in one.sites.items()
        if part.validation_loss is not None and math.isfinite(part.validation_loss)
    }
