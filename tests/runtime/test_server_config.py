"""The server's settings: what is refused, and how FLARE's job export finds what it must write."""

import json
from pathlib import Path

import pytest
import yaml
from nvflare.job_config.api import FedJob

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.methods.fedtar.controller import TemporalResidualController
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.server_config import ServerConfig

BAD = yaml.safe_load(Path(__file__).with_name("wrong_server_settings.yaml").read_text())


@pytest.mark.parametrize(("name", "settings"), [(name, one) for name, several in BAD.items() for one in several])
def test_a_bad_setting_is_refused_by_name_when_the_controller_is_built(name, settings):
    with pytest.raises(ConfigError, match=rf"^server: .*\b{name}\b"):
        TemporalResidualController(**settings)


def test_what_a_method_cannot_do_is_refused_by_the_name_of_the_setting():
    for method, name, value, others in (
        ("local", "aggregation", "median", {"min_sites": 3}), ("fedkei", "aggregation", "median", {"min_sites": 3}),
        ("fedkei", "wait_seconds", 5, {}), ("fedkei", "rounds_per_period", 1, {"num_rounds": 1}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{name}: method '{method}'"):
            FederatedController(method, **{name: value, "time_steps": 2} | others)


CHANGED = {"num_rounds": 5, "max_share": 0.5, "wait_seconds": 2.5, "unseen": ["site-3"], "seed": 7}


@pytest.mark.parametrize("kind", [FederatedController, TemporalResidualController])
def test_flare_exports_what_differs_from_the_defaults_and_builds_the_same_again(tmp_path, kind):
    """FLARE reads a constructor's signature and the attributes of the same names."""
    job = FedJob(name="job", min_clients=1)
    job.set_app_packages(["fedtar_flare"])
    job.to_server(kind("fedtar", **CHANGED, settings={"server": {"eta": 0.5}}))
    job.export_job(str(tmp_path))
    config = json.loads((tmp_path / "job" / "app_server" / "config" / "config_fed_server.json").read_text())
    arguments = config["workflows"][0]["args"]
    assert list(arguments) == ["method", "num_rounds", "max_share", "wait_seconds", "seed", "unseen", "settings"]
    again = kind(**arguments)
    assert again.config == ServerConfig(**CHANGED) and again.strategy.settings.server.eta == 0.5
