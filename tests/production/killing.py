"""What tests that kill processes share: settings of the job, and what they wait for and compare."""

import json

import torch
from command import fedtar
from federation_process import SITES, wait_for

from fedtar_flare.record.events import Start, Step
from fedtar_flare.record.log import of_kind
from fedtar_flare.site.context import state_of

LEAD = "lead@hub.org"
LONG = {"training": {"local_steps": 8, "batch_size": 4}}
LIMIT = 180
"""Seconds; generous, because a handshake on a busy machine starts with two minutes of imports."""


def steps(events):
    return of_kind(events, Step)


def check_same(a, b):
    """Weights, and what the method keeps at the server."""
    assert a.round == b.round
    for part in ("weights", "method"):
        torch.testing.assert_close(getattr(a, part), getattr(b, part), rtol=0, atol=1e-6)


def run_of(federation, identity):
    """The run id that the server made for a job."""
    begun = f"{identity} has begun\n{federation.tail(identity)}"
    return wait_for(begun, lambda: of_kind(federation.events(identity), Start))[0].run_id


def in_step(federation, identity, site, round_, step):
    """Waits until a site is within the training of a step: it has kept the broadcast and not yet its new state."""
    folder = state_of(federation.sites[site]) / run_of(federation, identity) / site
    file = folder / f"broadcast-{round_:04d}-{step - 1:02d}.safetensors"
    wait_for(f"{site} trains round {round_}, step {step}\n{federation.tail(identity)}", file.is_file, poll=0.01)


def round_1_is_whole(federation, identity):
    file = federation.server / "fedtar_checkpoints" / identity / "round-0001.safetensors"
    wait_for(f"round 1 is whole\n{federation.tail(identity)}", file.is_file, poll=0.01)


def kill_server_process(federation, identity):
    """Kills the job's process at the server, waits until the job has failed everywhere; the record until then."""
    process = federation.running_job("localhost", identity)
    process.suspend()
    events = federation.events(identity)  # before the kill, with which the run folder goes
    process.kill()
    assert federation.finished(identity) == "FINISHED:EXECUTION_EXCEPTION"
    all_gone(federation, identity)
    return events


def all_gone(federation, identity):
    names = ("localhost", *SITES)
    wait_for("its processes are gone", lambda: not any(federation.job_process(n, identity) for n in names))


def resume(federation, identity, *options):
    """The id of the job that goes on."""
    code, out, err = fedtar("resume", identity, "--kit", federation.kits / LEAD, "--json", *options)
    assert code == 0, err
    return json.loads(out)["job_id"]
