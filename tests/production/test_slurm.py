"""A hospital whose site is a job of a real Slurm, in a federation of real processes."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command import fedtar_here
from federation_process import BIN, SITES, Federation, free_port, recipe, wait_for

from fedtar_flare.reporting.run import read_run

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]
HERE = Path(__file__).parents[2]


@pytest.fixture
def slurm(tmp_path):
    """What a command of Slurm prints."""
    if os.getuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        pytest.skip("needs root, and Debian's slurmctld, slurmd, slurm-client, munge")
    environment = os.environ | {"SLURM_CONF": str(tmp_path / "slurm" / "slurm.conf")}

    def ask(*command, **more):
        done = subprocess.run([*map(str, command)], env=environment | more, capture_output=True, text=True, timeout=600)
        return (done.stdout + done.stderr).strip()

    with (tmp_path / "slurm.log").open("wb") as log:
        command = [HERE / "tests" / "slurm.sh", tmp_path / "slurm", str(free_port()), str(free_port())]
        daemons = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for("the node is there", lambda: ask("sinfo", "-h", "-o", "%T") == "idle")
        yield ask
        ask("scancel", "--user=root")
        wait_for("no job runs", lambda: not ask("squeue", "-h"))
    finally:
        daemons.terminate()
        daemons.wait(60)


def test_a_site_in_slurm_takes_part_once_and_comes_back_at_the_end_of_its_time(tmp_path, home, slurm):
    files = dict.fromkeys(SITES, "source: synthetic\n")
    files["hospital-b"] += f"state_dir: {tmp_path}/state\ncache_dir: {tmp_path}/cache\n"
    federation = Federation(tmp_path, home, files)
    kit, log = federation.sites["hospital-b"], tmp_path / "hospital-b.out"
    environment = {"FEDTAR_ENVIRONMENT": str(BIN.parent), "FEDTAR_HOME": "/nowhere"}
    options = [f"--chdir={kit}", f"--output={log}", "--parsable", "--gres=none", "--cpus-per-task=1"]
    with contextlib.closing(federation):
        submit = ("sbatch", *options, HERE / "provisioning" / "fedtar-site.slurm")
        first, second = (slurm(*submit, **environment) for _ in range(2))
        federation.start("localhost", "hospital-a")
        wait_for("both are there", lambda: federation.connected() == set(SITES))
        wait_for("a probe finds it ready", lambda: fedtar_here("health", "--kit", kit)[0] == 0)
        assert slurm("squeue", "-h", "-j", second, "-o", "%t %r") == "PD Dependency", "one kit, one site"
        recipe("in_slurm").export(str(tmp_path / "jobs"), byoc=False)
        record = read_run(federation.completed(job := federation.submit(tmp_path / "jobs" / "in_slurm")))
        assert [sorted(step.sites) for step in record.steps] == [sorted(SITES)] * 2
        assert (kit / job / "log.txt").stat().st_mode & 0o077 == 0 and (tmp_path / "state").is_dir()
        slurm("scancel", "--batch", "--signal=USR1", first)
        wait_for("it is in the queue again", lambda: "Restarts=1" in slurm("scontrol", "show", "job", first))
        assert fedtar_here("health", "--kit", kit, "--live")[0] == 1, "and no process of it is left"
