"""Run a function at once in processes that form a group, for tests of what they do together."""

import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

CONTEXT = get_context("forkserver")  # imports once; this process itself may have threads, which a fork would not copy
PACKAGE = [f"fedtar_flare.{name}" for name in ("methods.scaffold", "learning.evaluation", "synthetic.cohort")]
CONTEXT.set_forkserver_preload(["peft", "transformers.models.gpt2.modeling_gpt2", *PACKAGE])


def in_ranks(size, function, *arguments, device="cpu"):
    """What ``function(ranks, *arguments)`` returns on each rank, by rank; ``function`` is a module's own."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, CONTEXT) as pool:
        ranks = [pool.submit(_run, rank, size, device, folder, function, arguments) for rank in range(size)]
        return [rank.result() for rank in ranks]


def _run(rank, size, device, folder, function, arguments):
    from fedtar_flare.learning.ranks import Ranks, join

    torch.set_num_threads(1)
    ranks = Ranks(rank, size)
    join(ranks, device, Path(folder))
    try:
        found = function(ranks, *arguments)
        ranks.wait()  # one that ended before the others had its last words would break theirs off
    finally:
        torch.distributed.destroy_process_group()  # so that no other waits for one that failed
    return found
