"""Numbers that stand beside the first command's result are those of the suite's runs, and of no other job."""

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


def test_means_over_hospitals_and_seeds_stand_beside_the_very_job(tmp_path, monkeypatch):
    run = read_run(write_run(tmp_path / "run", sites=SITES, content=True))
    suite = {"name": "made-up", "sites": SITES, "seeds": [0, 1], "settings": {"preset": "tiny"}, "arms": ARMS}
    (file := tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    planned = [run for run in experiments(read_suite(file)) if run.name == "alone"]
    for done, values in zip(planned, [(0.2, 0.4), (0.5, 0.7)], strict=True):
        scores = [{"all": {"n": 40, "degree_accuracy": value}} for value in values]
        event = {"round": 3, "sites": dict(zip(SITES, scores, strict=True)), "generic": {}}
        result = {"scored_round": 3, "evaluations": [event], "counts": run.start.counts, "shares": False}
        write_json(result_file(tmp_path / "out", done), result | {"label": "alone", "seed": done.seed})
    kept = keep(tmp_path / "run", tmp_path / "out", str(file), tmp_path / "control.json")
    monkeypatch.setattr(control, "SHIPPED", kept)
    box = closing_box(run).splitlines()
    assert "each hospital alone: kept from suite made-up, seed 0, 1" in box
    (line,) = (line for line in box if line.startswith("degree right"))
    assert line.endswith("alone 45.0")
    other = read_run(write_run(tmp_path / "other", sites=SITES, content=True, rounds=2))
    assert UNKNOWN in closing_box(other)
