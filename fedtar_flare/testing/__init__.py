"""Helpers for tests of methods, scores and sources, this package's and others'.

A federation in one process (:mod:`.federation`), a made-up hospital that does single tasks (:mod:`.hospital`), and
checks that every method must pass (:mod:`.conformance`). Nothing outside of tests imports this package.
"""

from fedtar_flare.runtime.simulation import run_in_process
from fedtar_flare.testing.conformance import check_method
from fedtar_flare.testing.federation import FunctionFederation, QuadraticSite, last_checkpoint, random_pair, same_bits
from fedtar_flare.testing.hospital import Hospital, executor_of, task_of

__all__ = [
    "FunctionFederation",
    "Hospital",
    "QuadraticSite",
    "check_method",
    "executor_of",
    "last_checkpoint",
    "random_pair",
    "run_in_process",
    "same_bits",
    "task_of",
]
