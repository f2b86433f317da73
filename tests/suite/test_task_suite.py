"""Suites of methods that learn tasks of classification: what may be compared, scores with intervals, the page."""

from pathlib import Path

import numpy as np
import pytest
from made_up_results import keep

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.metrics.classification import auc, lca
from fedtar_flare.suite import page
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.plan import experiments
from fedtar_flare.suite.results import by_arm, read_results
from fedtar_flare.suite.run import run_suite
from fedtar_flare.suite.task_page import Run, differences, values

SITES = ["site-1", "site-2"]
SETTINGS = {
    "preset": "tiny",
    "torch_threads": 1,
    "training": {"epochs": 2, "batch_size": 8},
    "data": {"synthetic_patients": 20},
    "fedkei": {"tasks": ["effusion", "nodule"], "base": ["none", "cardiomegaly"]},
}
ARMS = {
    "rand": {"method": "fedkei", "label": "Rand", "settings": {"fedkei": {"plan": "rand"}}},
    "fedkei": {"method": "fedkei", "label": "FedKEI <b>"},
}
SUITE = {"name": "tasks", "sites": SITES, "seeds": [0, 1], "settings": SETTINGS, "arms": ARMS}
EPOCHS = 2


def made(folder: Path, better=0.0, shuffled_too=False, one_class=(), **changes):
    """A suite whose results nobody ran: FedKEI's scores of positives are higher by ``better``."""
    arms = ARMS | ({"other": {"method": "fedkei", "label": "other order"}} if shuffled_too else {})
    suite = Suite(**{**SUITE, "arms": arms, **changes})
    planned = experiments(suite)
    for one in planned:
        draw = np.random.default_rng(one.seed)  # the same images and noise for all arms
        rows, tasks = [], []
        for step, task in enumerate(("effusion", "nodule"), start=1):
            for site in SITES:
                about = {"step": step, "site": site, "task": task}
                tasks.append(about | {"seconds": [0.5 * step, 2.0, 3.0], "start_seconds": 0.5, "membership": 0.6})
                for i in range(12):
                    scores = draw.random(EPOCHS + 1) + (better if one.name == "fedkei" and i % 2 else 0.0)
                    name = f"{'o' if one.name == 'other' else 'p'}-{i // 2}"
                    label = 0 if task in one_class else i % 2
                    rows.append({**about, "patient_id": name, "label": label, "scores": scores.tolist()})
        known = {"label": one.arm.label, "versions": {"torch": "2"}, "bytes": 1000, "seconds": 9.0, "tasks": tasks}
        keep(folder, one, known, rows)
    return suite, planned


def runs_by_arm(results):
    return {name: [Run(one) for one in several] for name, several in by_arm(results).items()}


def test_what_only_reports_answer_is_refused_and_so_are_both_kinds_in_one_table():
    for change in ({"outside": ["site-3"]}, {"arms": {**ARMS, "fedavg": {"method": "fedavg"}}, "settings": {}}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            experiments(Suite(**{**SUITE, **change}))


def test_scores_are_means_over_sites_of_the_tasks_after_the_first(tmp_path):
    _, planned = made(tmp_path)
    for one in read_results(tmp_path, planned):
        run = Run(one)
        wanted = []
        for site in SITES:
            rows = [row for row in one.rows if (row["site"], row["step"]) == (site, 2)]
            columns = np.array([row["scores"] for row in rows]).T
            wanted.append([auc([row["label"] for row in rows], column) for column in columns])
        means = [(curve[0], curve[-1], lca(curve), np.mean(curve)) for curve in wanted]
        assert run.scores()[:, 0] == pytest.approx(np.mean(means, axis=0))


def test_equal_arms_differ_by_nothing_and_a_better_one_by_more(tmp_path):
    _, planned = made(tmp_path, shuffled_too=True)
    found = differences(runs_by_arm(read_results(tmp_path, planned)), "rand")
    assert set(found) == {"fedkei"}, "an arm that met other images is not paired"
    assert all(one.value == (0, 0, 0) and one.p == 1 for one in found["fedkei"].values())
    _, planned = made(tmp_path / "better", better=0.6)
    arms = runs_by_arm(read_results(tmp_path / "better", planned))
    more = differences(arms, "rand")["fedkei"]["lca"]
    assert more.value.low > 0 and more.value.low < more.value.value < more.value.high and 0 < more.p < 1
    own = values(arms["rand"])["final"].value
    assert own.low < own.value < own.high
    epochs, seconds = zip(*(reached for run in arms["fedkei"] for reached in run.reached(arms["rand"][0])), strict=True)
    assert set(epochs) <= {0, 1, 2} and set(seconds) <= {1.0, 2.0, 3.0}


@pytest.mark.slow
def test_a_suite_is_run_to_its_page(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    planned = experiments(Suite(**{**SUITE, "seeds": [0]}))
    assert run_suite(tmp_path, planned, say=lambda line: None) == []
    rand, ours = (Run(one) for one in read_results(tmp_path, planned))
    assert rand.images == ours.images
    first = [cell for cell in rand.cells if cell[0] == 1]
    assert first and all(rand.curves()[cell] == ours.curves()[cell] for cell in first), "no pool, no difference"
    assert ours.tasks[2, "site-1"]["start_seconds"] > rand.tasks[2, "site-1"]["start_seconds"]
    assert not [folder for folder in (tmp_path / "home").glob("state/*/*") if folder.parent.name != "sites"]
    assert page.write_page(tmp_path, Suite(**{**SUITE, "seeds": [0]}), planned)
