"""What robust aggregation costs in scores, and what it saves where one hospital of five lies; prints a table.

``python -m tools.robust_cost robust`` takes a quarter of an hour of a core. All runs are of FedAvg with the same seed.
The liar trains as the others do and sends its update times -4, which stays within the allowed length.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.protocol.tasks import TRAIN
from fedtar_flare.reporting.run import read_run
from fedtar_flare.runtime.aggregation import FEWEST_SITES
from fedtar_flare.runtime.in_process import InThisProcess, run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe

SITES = [f"site-{n}" for n in range(1, 6)]
LIAR = SITES[-1]
SCORES = ("token_loss", "finding_f1_known")
SETTINGS: dict[str, Any] = {
    "preset": "small",
    "num_rounds": 3,
    "time_steps": 1,
    "training": {"local_steps": 24},
    "data": {"synthetic_patients": 24},
}


def lying(deliver: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's way to a site, with the liar's updates turned round."""

    def delivered(self: InThisProcess, site: str, task: str, message: Any) -> Any:
        answer = deliver(self, site, task, message)
        if (site, task) == (LIAR, TRAIN):
            model = FLModelUtils.from_shareable(answer)
            model.params = {name: -4 * value for name, value in (model.params or {}).items()}
            answer = FLModelUtils.to_shareable(model)
        return answer

    return delivered


def scores(folder: Path, aggregation: str, lies: bool) -> list[float]:
    """Means over the four honest hospitals after the last round."""
    server = {"aggregation": aggregation, "evaluate_every": SETTINGS["num_rounds"]}
    recipe = MethodRecipe("fedavg", server=server, min_sites=3, **SETTINGS)
    honest = InThisProcess.deliver
    with patch.object(InThisProcess, "deliver", lying(honest) if lies else honest):
        results = run_in_process(recipe, SITES, folder)
    last = read_run(results).evaluations[-1].sites
    of = [last[site].all for site in SITES if site != LIAR]
    return [sum(cell.get(name) or 0.0 for cell in of) / len(of) for name in SCORES]


if __name__ == "__main__":
    names = " | ".join(SCORES)
    print(f"| server.aggregation | {names} | with a liar: {names} |\n|{'---|' * (1 + 2 * len(SCORES))}", flush=True)
    for kind in FEWEST_SITES:
        both = [scores(Path(sys.argv[1]) / f"{kind}-{lies}", kind, lies) for lies in (False, True)]
        print(f"| {kind} | {' | '.join(f'{value:.3f}' for row in both for value in row)} |", flush=True)
