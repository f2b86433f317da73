"""Settings of a method that cannot be fail when the job is made, and the error names them (``refusals.yaml``)."""

from pathlib import Path

import pytest
import yaml

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.testing import executor_of

REFUSED = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@pytest.mark.parametrize(("method", "settings", "word"), REFUSED)
def test_settings_that_cannot_be_are_refused_when_the_job_is_made(method, settings, word):
    with pytest.raises(ConfigError, match=word):
        (executor_of if "torch_threads" in settings else MethodRecipe)(method, **settings)
