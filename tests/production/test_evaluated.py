"""An evaluation over mTLS: hospitals' own candidates, compared by what their guards let pass."""

import csv
import json
from functools import partial

import pytest
from federation_process import SITES

from fedtar_flare.data.cells import Timeline
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.synthetic.cohort import synthetic_cohort

pytestmark = pytest.mark.production


def test_hospitals_compare_their_candidates_over_mtls(federation, exported, home):
    files = {name: kit / "local" / "fedtar.yaml" for name, kit in federation.sites.items()}
    before = {name: file.read_text() for name, file in files.items()}
    for name, file in files.items():
        cohort = synthetic_cohort(name, folder=home / "synthetic", patients=12, timeline=Timeline(2), seed=0)
        for candidate, kept in (("whole", 100), ("half", 3)):
            texts = [(s.visit.visit_id, ". ".join(s.visit.report.split(". ")[:kept])) for s in cohort.samples("test")]
            with (file.parent / f"{candidate}.csv").open("w", newline="") as opened:
                csv.writer(opened).writerows([("study_id", "prediction"), *texts])
        only = "  half: half.csv\n" if name == SITES[0] else ""
        file.write_text(f"{before[name]}candidates:\n  whole: whole.csv\n{only}")
    try:
        evaluation = partial(MethodRecipe, "evaluate", evaluate={"candidates": {"whole": "", "half": "", "job": ""}})
        results = federation.completed(federation.submit(exported("evaluated", method=evaluation)))
    finally:
        for name, file in files.items():
            file.write_text(before[name])
    scores = json.loads((results / "cross_val_results.json").read_text())
    assert {site: {*of} for site, of in scores.items()} == {
        SITES[0]: {"whole", "half", "job"},
        SITES[1]: {"whole", "job"},
    }
    assert all(of["whole"]["finding_f1"] > 0.9 > of["job"].get("finding_f1", 0) for of in scores.values())
    page = (results / "report.html").read_text()
    assert "whole - half" in page and "not-here" in page
