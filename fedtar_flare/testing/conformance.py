"""Checks that every method must pass: it exchanges what it declares, resumes to the bit, and answers an abort."""

import copy
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.protocol.contract import HANDSHAKE
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import ExecutorSite, InThisProcess, run_in_process
from fedtar_flare.testing.federation import last_checkpoint, same_bits
from fedtar_flare.testing.hospital import TINY as SECONDS

__all__ = ["check_method"]

SITES = ("site-1", "site-2")
TINY: dict[str, Any] = {**SECONDS, "num_rounds": 2, "time_steps": 2}
"""A job of seconds; what a caller gives wins over it."""


def check_method(method: str, folder: Path, **arguments: Any) -> None:
    """Check an installed method: it exchanges what it declares, resumes to the bit, and answers an abort.

    Parameters
    ----------
    method : str
    folder : Path
        Empty; what the runs leave goes there. Set ``FEDTAR_HOME`` to a folder of the test, so that caches are its own.
    **arguments
        Of :class:`~fedtar_flare.runtime.recipe.MethodRecipe`, over those of a tiny job.

    Raises
    ------
    AssertionError
        The method does not keep to its contract; the message says in what.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = _check_exchange(MethodRecipe(method, **TINY | arguments), folder / "whole")
    _check_resume(method, whole, folder, **arguments)
    _check_abort(MethodRecipe(method, **TINY | {"num_rounds": 1} | arguments), folder / "abort")


def _check_exchange(recipe: MethodRecipe, folder: Path) -> Path:
    """Run a job and hold every message of the sites against the method's contract; return the job's results."""
    contract = recipe.contract
    tensors: dict[str, set[str]] = defaultdict(set)
    fields: dict[str, set[str]] = defaultdict(set)

    class Tapped(ExecutorSite):
        def __call__(self, task: str, message: Shareable) -> Shareable:
            answer = super().__call__(task, message)
            if answer.get_return_code() in (None, ReturnCode.OK):
                model = FLModelUtils.from_shareable(answer)
                reply = Reply.from_meta(model.meta)
                tensors[task] |= set(model.params or {})
                fields[task] |= {*reply.numbers, *reply.payload}
            return answer

    controller = _run(recipe, folder, Tapped, SITES)
    assert not controller.panics, f"the run failed: {controller.panics[0]}"
    wire = contract.allowing(["*"])
    for task in contract.tasks:
        groups = {wire.group_of(task, name) for name in tensors[task.name]}
        undeclared = fields[task.name] - {field.name for field in task.fields}
        assert None not in groups, f"task '{task.name}' sent tensors of no declared group"
        assert not undeclared, f"task '{task.name}' sent the fields {sorted(undeclared)}, which it does not declare"
    return controller.results_folder


def _check_resume(method: str, whole: Path, folder: Path, **arguments: Any) -> None:
    """Compare a run of two rounds with one that stopped after the first round and was resumed."""
    first = whole / "checkpoint" / "round-0001.safetensors"
    stopped = folder / "stopped"
    stopped.mkdir()
    for name in (first.name, "best.safetensors"):
        shutil.copy(first, stopped / name)
    server = {**(arguments.get("server") or {}), "resume_from": str(stopped)}
    resumed = MethodRecipe(method, **TINY | arguments | {"server": server})
    again = run_in_process(resumed, SITES, folder / "resumed")
    assert same_bits(last_checkpoint(whole), last_checkpoint(again)), f"{method} does not resume to the bit"


def _check_abort(recipe: MethodRecipe, folder: Path) -> None:
    """Abort each task after the handshake, and look that it stops without an answer."""

    class Aborted(ExecutorSite):
        def __call__(self, task: str, message: Shareable) -> Shareable:
            if task != HANDSHAKE:
                self.signal.trigger("the job is aborted")
            answer = super().__call__(task, message)
            code = answer.get_return_code()
            assert task == HANDSHAKE or code == ReturnCode.TASK_ABORTED, f"task '{task}' answered {code} after an abort"
            return answer

    _run(recipe, folder, Aborted, SITES[:1])


def _run(recipe: MethodRecipe, folder: Path, kind: type[ExecutorSite], names: Sequence[str]) -> InThisProcess:
    """Run a job with sites of a kind."""
    sites = {name: kind(name, copy.deepcopy(recipe.executor), folder / "sites" / name) for name in names}
    controller = InThisProcess(folder, sites, **recipe.controller_arguments)
    controller.run()
    return controller
