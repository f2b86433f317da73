"""Run a function at once in processes that form a group, for tests of what they do together."""

import tempfile
import traceback
from multiprocessing import get_context
from pathlib import Path

import torch

CONTEXT = get_context("forkserver")  # imports once; this process itself may have threads, which a fork would not copy
CONTEXT.set_forkserver_preload(
    [
        "peft",
        "transformers.models.gpt2.modeling_gpt2",
        "fedtar_flare.methods.scaffold",
        "fedtar_flare.learning.evaluation",
        "fedtar_flare.synthetic.cohort",
    ]
)


def in_ranks(size, function, *arguments, device="cpu"):
    """What ``function(ranks, *arguments)`` returns on each rank: by rank, of a picklable kind.

    ``function`` is a module's own. An exception in any of them is raised here as an AssertionError.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
        processes = [
            CONTEXT.Process(target=_run, args=(function, rank, size, device, folder, arguments, sender), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            found = [receiver.recv() for receiver, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    errors = [text for text, _ in found if text]
    assert not errors, "\n".join(errors)
    return [result for _, result in found]


def _run(function, rank, size, device, folder, arguments, sender):
    from fedtar_flare.learning.ranks import Ranks, join

    torch.set_num_threads(1)
    ranks = Ranks(rank, size)
    try:
        join(ranks, device, Path(folder))
        sender.send(("", function(ranks, *arguments)))
        ranks.wait()  # one that ended before the others had its last words would break theirs off
    except Exception:
        sender.send((traceback.format_exc(), None))
