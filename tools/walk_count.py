"""How far a task walks through the package: functions, files and rooms that are entered at least once.

``python -m tools.walk_count site|server|scores|setting [--list]``: ``site`` is a whole training task at a site,
``server`` an exchange with its sites, ``scores`` the way from texts to scores, ``setting`` a recipe made from
arguments. A tiny FedTAR run of two sites in one process. Comprehensions and lambdas count as functions where Python
runs them as such (3.11).
"""

import argparse
import collections
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fedtar_flare
from fedtar_flare.learning import site_model
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import run_in_process
from fedtar_flare.runtime.site_executor import SiteExecutor

ROOT = f"{Path(fedtar_flare.__file__).parent}/"
WATCHED: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "site": (SiteExecutor, "execute", lambda executor, task, *_: task == "train"),
    "server": (FederatedController, "train", lambda *_: True),
    "scores": (site_model, "site_scores", lambda *_: True),
}
"""What is called, by walk: its holder, its name, and which of its calls is meant."""


class Walk:
    """Functions that were entered, by file and qualified name."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            self.functions.add((file.removeprefix(ROOT), frame.f_code.co_qualname))

    def watch(self, holder: Any, name: str, meant: Callable[..., bool]) -> None:
        """Record the first call of a function that is meant."""
        whole = getattr(holder, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            if self.functions or not meant(*arguments):
                return whole(*arguments, **named)
            sys.setprofile(self)
            try:
                return whole(*arguments, **named)
            finally:
                sys.setprofile(None)

        setattr(holder, name, watched)


def main() -> None:
    """Run one walk and print what it entered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walk", choices=[*WATCHED, "setting"])
    parser.add_argument("--list", action="store_true", help="functions by file")
    arguments = parser.parse_args()
    walk = Walk()
    if arguments.walk == "setting":
        MethodRecipe("fedtar", preset="tiny")  # so that imports do not count
        sys.setprofile(walk)
        MethodRecipe("fedtar", preset="tiny", training={"lr": 5e-4})
        sys.setprofile(None)
    else:
        walk.watch(*WATCHED[arguments.walk])
        training, data = {"local_steps": 1, "batch_size": 1}, {"synthetic_patients": 12}
        recipe = MethodRecipe("fedtar", preset="tiny", num_rounds=1, time_steps=1, data=data, training=training)
        with tempfile.TemporaryDirectory() as folder:
            run_in_process(recipe, 2, Path(folder) / "run")
    files = collections.Counter(file for file, _ in walk.functions)
    rooms = {file.split("/")[0] for file in files}
    print(f"{arguments.walk}: {len(walk.functions)} functions, {len(files)} files, {len(rooms)} rooms")
    for file, count in files.most_common() if arguments.list else ():
        names = sorted(name for where, name in walk.functions if where == file)
        print(f"  {count:4d} {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
