"""One home for all made-up hospitals of this folder, so that their patients are drawn once."""

import pytest


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")
