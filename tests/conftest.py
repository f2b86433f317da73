"""Shared fixtures: fixed seeds and threads, and the real public data where it is present."""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("wide", max_examples=1000, derandomize=False, deadline=None)  # --hypothesis-profile=wide
settings.load_profile("fixed")  # the same examples in every run

os.environ.pop("FEDTAR_SITES", None)  # which every test that has site files sets by itself
REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY))  # for `tools` and the bench; last, since the installed package comes first

LONGEST = (
    "test_paper_tables.py", "test_faults.py", "test_first_command.py", "test_methods.py", "test_shipped_job.py",
    "test_a_run_and_after.py", "test_conformance.py", "test_executor.py", "test_learner.py",
)  # fmt: skip
"""Files that begin first, so that no process is left alone with one of them at the end."""


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(autouse=True)
def _fixed_seeds():
    import torch

    torch.set_num_threads(1)  # two that wait for each other's core take ten times as long on a busy machine
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - third-party code under test draws from the global generator
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """Folder of caches of all processes that test: synthetic patients that many tests train on are made once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "home"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """Folder of caches, and of simulated sites' state, of this test alone."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def cohort(home):
    """Sixteen synthetic patients of two visits at one site, prepared for the preset ``tiny``; nobody changes it."""
    from fedtar_flare.data.cells import Timeline
    from fedtar_flare.imaging.pipeline import prepare_cohort
    from fedtar_flare.models.config import preset
    from fedtar_flare.synthetic.cohort import synthetic_cohort

    made = synthetic_cohort("site-1", folder=home / "synthetic", patients=16, timeline=Timeline(2), seed=0)
    return prepare_cohort(made, preset("tiny"), home / "prepared")


@pytest.fixture
def site_files(home, tmp_path, monkeypatch):
    """The folder of files of synthetic sites, whose state lies in the test's own folder."""
    from hospital_site import write_site_files

    write_site_files(tmp_path, home, monkeypatch)
    return tmp_path / "sites"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real public data; the test is skipped, with the reason, where it is absent."""
    folder = Path(os.environ.get("FEDTAR_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real public data not found at {folder}; set FEDTAR_SHARED_DATA")
    return folder


@pytest.fixture
def announce(monkeypatch):
    """Announces a method, or something else of a ``kind``, beside the installed ones for one test."""
    from fedtar_flare import registry
    from fedtar_flare.core import plugins

    def announce(announced, kind="method"):
        point = SimpleNamespace(name=announced.name, value="a test's", dist=None, load=lambda: announced)
        monkeypatch.setitem(plugins.announced(kind), announced.name, point)
        return announced

    yield announce
    registry.method.cache_clear()


@pytest.fixture
def madeup(announce):
    """The contract of the made-up method, which is announced beside the others for one test."""
    from made_up import METHOD

    return announce(METHOD).contract
