"""RadEval's metrics from local weights. Its library is no package of the tests: one of its interface stands in."""

import json
import re
import sys

import pytest
from command import failing, passing
from huggingface_hub import constants
from tables import cases

from fedtar_flare.core.files import write_text
from fedtar_flare.learning.evaluation import report_rows, write_report_scores
from fedtar_flare.metrics import radeval
from fedtar_flare.metrics.registry import AT_SITE, SCORES

LIBRARY = """
class RadEval:
    KEYS = {"radgraph": ["radgraph_simple", "radgraph_partial", "radgraph_complete"], "radcliq": ["radcliq_v1"]}

    def __init__(self, metrics, per_sample, show_progress):
        print("Using device: cpu")
        (self.name,) = metrics
        assert per_sample and not show_progress and metrics[self.name] == {}

    def __call__(self, refs, hyps):
        assert type(refs) is type(hyps) is list and all(hyps)
        values = [float("nan") if draft == "None" else float(ref == draft) for ref, draft in zip(refs, hyps)]
        return {key: values[1:] if "broken" in hyps else values for key in self.KEYS.get(self.name, [self.name])}
"""
PARTS = cases(__file__, "radeval.yaml")


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """The folder of weights, empty; the library is importable, and what it sets is undone afterwards."""
    write_text(tmp_path / "lib/radeval/__init__.py", LIBRARY)
    write_text(tmp_path / "lib/nltk/__init__.py", "download = None")
    about = "Metadata-Version: 2.1\nName: radeval\nVersion: 2.2.1\n"
    write_text(tmp_path / "lib/radeval-2.2.1.dist-info/METADATA", about)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    for name in ("radeval", "nltk", "RadEval"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.setattr(constants, name, getattr(constants, name))
    return tmp_path / "weights"


def bring(weights, *metrics):
    for file in (weights / part for metric in metrics for part in PARTS[metric]):
        write_text(file, "{}")
        if "snapshots" in file.parts:
            write_text(file.parents[2] / "refs/main", "a1")


def tables(folder, drafts, name="drafts"):
    rows = [f"s{i},p{i // 2},Lungs are clear. Case {i}." for i in range(len(drafts))]
    write_text(folder / "reports.csv", "\n".join(["study_id,patient_id,report", *rows, ""]))
    lines = [f"s{i},{draft or f'Lungs are clear. Case {i}.'}" for i, draft in enumerate(drafts)]
    return write_text(folder / f"{name}.csv", "\n".join(["study_id,prediction", *lines, ""]))


def test_they_are_in_the_table_with_intervals_and_tests_and_the_weights_are_named(tmp_path, weights):
    bring(weights, "radgraph", "bertscore")
    files = [tables(tmp_path, ["", "", "Port.", " "], "one"), tables(tmp_path, ["Port."] * 3 + [""], "two")]
    command = ["score", "--drafts", *files, "--reports", tmp_path / "reports.csv", "--metrics", "radgraph,bertscore"]
    command += ["--weights", weights, "--json", "-o", tmp_path / "page.html"]
    found = json.loads(passing(*command))
    values = found["values"][str(files[0])]
    assert values["radgraph_simple"][0] == values["bertscore"][0] == pytest.approx(2 / 3), "an empty draft has no value"
    assert values["bertscore"][1] < values["bertscore"][0] <= values["bertscore"][2] and "rouge_l" in values
    assert {"radgraph_partial", "bertscore"} <= {test["score"] for test in found["tests"]}
    assert found["models"].startswith("RadEval 2.2.1; SHA-256")
    assert len(re.findall(r"\b[0-9a-f]{64}\b", found["models"])) == 2
    assert "RadGraph F1 (simple) ↑, × 100" in (page := (tmp_path / "page.html").read_text()) and found["models"] in page
    write_text(weights / PARTS["radgraph"][0], "other")
    assert json.loads(passing(*command))["models"] != found["models"]


def test_a_run_s_reports_are_scored_and_compared_and_no_run_has_these_scores(tmp_path, weights, cohort):
    bring(weights, "radcliq")
    samples = cohort.samples("test")
    references, states = [sample.visit.report for sample in samples], [tmp_path / "one", tmp_path / "other"]
    for state, drafts in zip(states, (references, ["Port."] * len(samples)), strict=True):
        write_report_scores(state, 1, report_rows(samples, drafts, [1.0] * len(samples), personal=True))
    command = ["score", states[0], "--against", states[1], "--metrics", "radcliq", "--weights", weights]
    out = passing(*command)
    assert "RadCliQ-v1 ↓, points" in out and f"{len(samples)} studies" in out and "Using device" not in out
    (test,) = [t for t in json.loads(passing(*command, "--json"))["tests"] if t["score"] == "radcliq_v1"]
    assert test["difference"][0] == 1 and test["win_rate"] == 0, "the lower, the better"
    assert not AT_SITE.keys() & {*SCORES}


def test_what_is_missing_broken_or_would_leave_is_said_in_a_sentence(tmp_path, weights, monkeypatch):
    drafts = tables(tmp_path, ["", "broken"])
    command = ["score", "--drafts", drafts, "--reports", tmp_path / "reports.csv", "--weights", weights, "--metrics"]
    for metric, parts in radeval.WEIGHTS.items():
        error = failing(*command, metric)
        for part in parts:
            assert f"{metric} needs {part}: hf download " in error and str(weights) in error
    assert "hf download FremyCompany/BioLORD-2023-C --cache-dir" in failing(*command, "ratescore")
    assert "would send reports to a provider" in failing(*command, "mammo_green")
    assert "'rouge' is unknown (known: radgraph" in failing(*command, "bertscore,rouge")
    bring(weights, "bertscore")
    assert "RadEval's bertscore has 1 values of 2 drafts" in failing(*command, "bertscore")
    monkeypatch.setattr(radeval, "_run", lambda *_: {}["x"])
    assert f"bertscore fails with the weights in {weights} (KeyError" in failing(*command, "bertscore")
    write_text(weights / PARTS["bertscore"][0], '{"auto_map": {"AutoModel": "someone/code--modeling.Model"}}')
    assert "names code of another repository" in failing(*command, "bertscore")
    write_text(weights / PARTS["bertscore"][0].replace("config.json", "modeling.py"), "")
    assert "modeling.py: RadEval might run this code" in failing(*command, "bertscore")
    monkeypatch.setitem(sys.modules, "radeval", None)
    assert "pip install 'fedtar_flare[radeval]'" in failing(*command, "bertscore")
