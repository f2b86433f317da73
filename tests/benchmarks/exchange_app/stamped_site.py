"""Our side of the exchange comparison: a site that answers at once and notes when each training task reached it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from trivial_site import TrivialExecutor

from fedtar_flare.protocol.tasks import TRAIN


class StampedExecutor(TrivialExecutor):
    """Appends the machine's clock to ``$EXCHANGE_STAMPS/SITE`` at every training task."""

    def perform(self, task, header, weights, site):
        if task == TRAIN:
            with Path(os.environ["EXCHANGE_STAMPS"], site.name).open("a") as file:
                file.write(f"{time.monotonic()}\n")
        return super().perform(task, header, weights, site)
