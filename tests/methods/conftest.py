"""Synthetic hospitals for the tests of this folder."""

import pytest
import torch
from hospital_site import write_site_files

from fedtar_flare.testing import Hospital


@pytest.fixture
def hospital(site_files, tmp_path):
    """Site files of the test's own folder; makes a site, does its handshake, and gives the site, reply and start."""

    def greeted(run_id="run", evaluate=False, **settings):
        site = Hospital(tmp_path, **settings)
        return site, *site.handshake(run_id, evaluate=evaluate)

    return greeted


@pytest.fixture(scope="module")
def place(home, tmp_path_factory):
    """A folder with site files for the hospitals that the tests of a module share."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("hospital")
    write_site_files(folder, home, patch)
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def without_site_files(home):
    """The environment of simulated sites that share the session's cache of images."""
    patch = pytest.MonkeyPatch()
    patch.setenv("FEDTAR_HOME", str(home))
    patch.delenv("FEDTAR_SITES", raising=False)
    torch.set_num_threads(1)
    yield patch
    patch.undo()
