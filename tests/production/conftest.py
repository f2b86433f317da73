"""One provisioned federation for all production tests, and the tiny job that they submit."""

from pathlib import Path

import pytest
from federation_process import Federation, recipe


@pytest.fixture(scope="session")
def federation(tmp_path_factory, home):
    """A server and two sites, up and registered."""
    with Federation(tmp_path_factory.mktemp("federation"), home).running() as federation:
        yield federation


@pytest.fixture
def exported(tmp_path):
    """Exports the tiny job without a ``custom`` folder, as production has it."""

    def export(name: str = "tiny", rounds: int = 1, **changes) -> Path:
        recipe(name, rounds, **changes).export(str(tmp_path / "jobs"), byoc=False)
        return tmp_path / "jobs" / name

    return export
