"""What other users of a machine could read of a provisioned project and a run's state: nothing but what is listed."""

import os
from contextlib import contextmanager

import pytest
from kits import make_kit, provisioned

from fedtar_flare.provision.kit import complete_kit
from fedtar_flare.provision.retention import main as retention
from fedtar_flare.site.cohort import site_key
from fedtar_flare.site.context import Participation, decide, state_of
from fedtar_flare.testing.hospital import Hospital

WIDE = {
    "*/fedtar_trial": "the project's folder, which FLARE makes before our builder's turn; it holds private folders",
    "*/startup/*.sh": "FLARE's start scripts, which it makes executable for everybody; they hold no secret",
    "*/relay/local/comm_config.json": "a relay's host and port, which FLARE writes after our builder's turn",
}
"""What may be read by others, and why."""


@contextmanager
def widest():
    """Files get the modes that they are made with, whatever the user's habits are."""
    before = os.umask(0)
    try:
        yield
        assert os.umask(0) == 0, "the process is left as it was"
    finally:
        os.umask(before)


def wide(folder):
    """What others may read below a folder, or get to the contents of, and is not listed."""
    paths = [path for path in (folder, *folder.rglob("*")) if path.lstat().st_mode & 0o077]
    return {str(path.relative_to(folder.parent)) for path in paths if not any(map(path.match, WIDE))}


@pytest.fixture(scope="module")
def project(repository, tmp_path_factory):
    """Provisioned by FLARE, with a server, two hospitals, a relay and people."""
    relay = {"name": "relay", "type": "relay", "org": "hub"}
    relay |= {"listening_host": {"default": "localhost", "scheme": "grpc", "port": 8102}}
    with widest():
        return provisioned(repository, tmp_path_factory.mktemp("project"), ["hospital-a"], [relay]).of.parent


def test_a_provisioned_project_is_its_owner_s_alone(project):
    assert {path.name for path in project.glob("prod_00/*")} >= {"localhost", "hospital-a", "relay", "lead@hub.org"}
    assert wide(project) == set()
    keys = [*project.rglob("*.key"), project / "state" / "cert.json"]
    assert len(keys) > 5 and not any(path.stat().st_mode & 0o077 for path in keys)


def test_a_project_that_was_provisioned_wide_is_narrowed_before_keys_are_written_again(project, repository):
    (project / "state" / "cert.json").chmod(0o644)
    (project / "state").chmod(0o755)
    with widest():
        provisioned(repository, project.parent)
    assert wide(project) == set() and (project / "prod_01").is_dir()


def test_a_kit_that_is_completed_by_hand_stays_private(project):
    for kit in (project / "prod_00" / name for name in ("hospital-a", "localhost", "relay")):
        with widest():
            complete_kit(kit)
    assert wide(project / "prod_00") == set()


def test_a_run_s_state_is_its_owner_s_alone(tmp_path, own_home):
    """Everything below the state and the prepared images; phantoms are nobody's."""
    kit = make_kit(tmp_path / "kit")
    with widest():
        site = Hospital(kit, simulated=False)
        weights = site.handshake()[1]
        site.train(weights, 1, 1)
        site.close(weights, 1, evaluate=True)
        decide(state_of(kit), Participation.PAUSED)
        site_key(state_of(kit))
        retention([str(kit)])
    made = {path.name for path in state_of(kit).rglob("*")}
    assert {"participation.json", "run.json", "fedtar.key"} <= made and len(made) > 8
    assert wide(state_of(kit)) == wide(own_home / "prepared") == set()
