"""Numbers that stand beside the first command's result are those of the suite's runs, and of no other job."""

import pytest
import yaml
from recorded_runs import write_run

from fedtar_flare.core.files import write_json
from fedtar_flare.reporting import control
from fedtar_flare.reporting.run import read_run
from fedtar_flare.reporting.verdict import UNKNOWN, closing_box
from fedtar_flare.suite.file import read_suite
from fedtar_flare.suite.plan import experiments
from fedtar_flare.suite.results import result_file
from tools.keep_control import keep

SITES = ["site-1", "site-2"]
ARMS = {"alone": {"method": "local_patient"}, "fedtar": {"method": "fedtar"}}


@pytest.fixture
def suite_of(tmp_path):
    """A suite file, and the results of its seeds that ``done`` has scores of."""

    def make(done, counts):
        file = tmp_path / "suite.yaml"
        suite = {"name": "made-up", "sites": SITES, "seeds": [0, 1], "settings": {"preset": "tiny"}, "arms": ARMS}
        file.write_text(yaml.safe_dump(suite))
        planned = [run for run in experiments(read_suite(file)) if run.name == "alone"]
        for run, values in zip(planned, done, strict=False):
            scores = [{"all": {"n": 40, "degree_accuracy": value}} for value in values]
            event = {"round": 3, "sites": dict(zip(SITES, scores, strict=True)), "generic": {}}
            result = {"scored_round": 3, "evaluations": [event], "counts": counts, "shares": False}
            write_json(result_file(tmp_path / "out", run), result | {"label": "alone", "seed": run.seed})
        return str(file)

    return make


def test_means_over_hospitals_and_seeds_stand_beside_the_very_job(tmp_path, suite_of, monkeypatch):
    run = read_run(write_run(tmp_path / "run", sites=SITES, content=True))
    file = suite_of([(0.2, 0.4), (0.5, 0.7)], run.start.counts)
    monkeypatch.setattr(control, "SHIPPED", keep(tmp_path / "run", tmp_path / "out", file, tmp_path / "control.json"))
    box = closing_box(run).splitlines()
    assert "each hospital alone: kept from suite made-up, seed 0, 1" in box
    (line,) = (line for line in box if line.startswith("degree right"))
    assert line.endswith("alone 45.0")
    other = read_run(write_run(tmp_path / "other", sites=SITES, content=True, rounds=2))
    assert UNKNOWN in closing_box(other)
