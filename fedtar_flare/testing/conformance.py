"""Checks that every method must pass: it exchanges what it declares, resumes to the bit, and answers an abort."""

import copy
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.protocol.messages import Reply
from fedtar_flare.protocol.tasks import HANDSHAKE
from fedtar_flare.runtime.in_process import ExecutorSite, InThisProcess, run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.testing.federation import last_checkpoint, same_bits

__all__ = ["check_abort", "check_exchange", "check_method", "check_resume"]

SITES = ("site-1", "site-2")
TINY: dict[str, Any] = {
    "preset": "tiny",
    "num_rounds": 2,
    "time_steps": 2,
    "training": {"local_steps": 1, "batch_size": 4},
    "data": {"synthetic_patients": 12},
}
"""A job of seconds; what a caller gives wins over it."""


def check_method(method: str, folder: Path, **arguments: Any) -> None:
    """Run all checks of this module on an installed method.

    Parameters
    ----------
    method : str
        Its name.
    folder : Path
        Empty; what the runs leave goes there. Set ``FEDTAR_HOME`` to a folder of the test, so that caches are its own.
    **arguments
        Of :class:`~fedtar_flare.runtime.recipe.MethodRecipe`, over those of a tiny job.

    Raises
    ------
    AssertionError
        The method does not keep to its contract; the message says in what.
    """
    recipe = MethodRecipe(method, **TINY | {"num_rounds": 1} | arguments)
    folder.mkdir(parents=True, exist_ok=True)
    check_exchange(recipe, folder / "exchange")
    check_resume(method, folder / "resume", **arguments)
    check_abort(recipe, folder / "abort")


def check_exchange(recipe: MethodRecipe, folder: Path, sites: Sequence[str] = SITES) -> None:
    """Run a job and hold every message of the sites against the method's contract.

    Parameters
    ----------
    recipe : MethodRecipe
        A tiny job.
    folder : Path
        For what the run leaves.
    sites : sequence of str
        Names of synthetic sites.

    Raises
    ------
    AssertionError
        The run did not complete; a message held a tensor or a field that its task does not declare; or nothing of a
        declared group ever went up.
    """
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

    places = {name: Tapped(name, copy.deepcopy(recipe.executor), folder / "sites" / name) for name in sites}
    controller = InThisProcess(folder, places, **recipe.controller_arguments)
    controller.run()
    assert not controller.panics, f"the run failed: {controller.panics[0]}"
    wire = contract.allowing(["*"])
    for task in contract.tasks:
        groups = {wire.group_of(task, name) for name in tensors[task.name]}
        undeclared = fields[task.name] - {field.name for field in task.fields}
        assert None not in groups, f"task '{task.name}' sent tensors of no declared group"
        assert not undeclared, f"task '{task.name}' sent the fields {sorted(undeclared)}, which it does not declare"


def check_resume(method: str, folder: Path, sites: Sequence[str] = SITES, **arguments: Any) -> None:
    """Compare a run of two rounds with one that stopped after the first round and was resumed.

    Parameters
    ----------
    method : str
        Name of an installed method.
    folder : Path
        For what the runs leave.
    sites : sequence of str
        Names of synthetic sites.
    **arguments
        Of :class:`~fedtar_flare.runtime.recipe.MethodRecipe`, over those of a tiny job.

    Raises
    ------
    AssertionError
        The last checkpoints differ in a bit.
    """
    recipe = MethodRecipe(method, **TINY | arguments)
    whole = run_in_process(recipe, sites, folder / "whole")
    first = whole / "checkpoint" / "round-0001.safetensors"
    stopped = folder / "stopped"
    stopped.mkdir()
    for name in (first.name, "best.safetensors"):
        shutil.copy(first, stopped / name)
    server = {**(arguments.get("server") or {}), "resume_from": str(stopped)}
    resumed = MethodRecipe(method, **TINY | arguments | {"server": server})
    again = run_in_process(resumed, sites, folder / "resumed")
    assert same_bits(last_checkpoint(whole), last_checkpoint(again)), f"{method} does not resume to the bit"


def check_abort(recipe: MethodRecipe, folder: Path) -> None:
    """Abort each task after the handshake, and look that it stops without an answer.

    Parameters
    ----------
    recipe : MethodRecipe
        A tiny job.
    folder : Path
        For what the site leaves.

    Raises
    ------
    AssertionError
        A task went on, or gave an answer, although its job was aborted.
    """

    class Aborted(ExecutorSite):
        def __call__(self, task: str, message: Shareable) -> Shareable:
            if task == HANDSHAKE:
                return super().__call__(task, message)
            signal, context = Signal(), self._context()
            signal.trigger("the job is aborted")
            context.set_prop(ReservedKey.IDENTITY_NAME, self.name, private=False, sticky=False)
            context.set_prop(FLContextKey.SIMULATE_MODE, True, private=True, sticky=False)
            answer = self.executor.execute(task, message, context, signal)
            code = answer.get_return_code()
            assert code == ReturnCode.TASK_ABORTED, f"task '{task}' answered {code} although its job was aborted"
            return answer

    place = Aborted(SITES[0], copy.deepcopy(recipe.executor), folder / "sites" / SITES[0])
    controller = InThisProcess(folder, {SITES[0]: place}, **recipe.controller_arguments)
    controller.run()
