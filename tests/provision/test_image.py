"""The image is built on a base made here, and a server and a hospital run from it (``provisioning/try_image.sh``)."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "provisioning" / "try_image.sh"
OPTIONS = os.environ.get("FEDTAR_IMAGE")


@pytest.mark.production
@pytest.mark.timeout(3600)
@pytest.mark.skipif(OPTIONS is None, reason="FEDTAR_IMAGE, options of 'buildah bud', is not set; takes 30 GB and root")
def test_a_federation_completes_a_job_from_the_image():
    options = shlex.split(OPTIONS or "")
    run = subprocess.run([SCRIPT, *options], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert {"account: 10001", "folders of the kit that refuse a file: 2", "the kits are as they were"} <= {*lines}
    assert "it lists what pip and dpkg list, no more and no less" in lines
    assert [line.split(",")[0] for line in lines if line.startswith("health")] == [
        *("health of localhost: 1", "health of localhost: 0", "health of hospital-a: 1", "health of hospital-a: 0"),
        *("health of hospital-a: 1", "health of localhost: 1"),
    ]
    assert "0 failed" in run.stdout and "FINISHED:COMPLETED" in run.stdout
    (size,) = (int(line.split()[-1]) for line in lines if line.startswith("size"))
    assert size < (3000 if "CPU_INDEX" in (OPTIONS or "") else 8000)
