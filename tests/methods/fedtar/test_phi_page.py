"""The page of phi at a site: near patients stay near, every patient is a point, and nobody is named."""

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from fedtar_flare.data.cohort import Sample, Visit
from fedtar_flare.methods.fedtar import section
from fedtar_flare.reporting.plots import Chart


def test_a_point_for_each_patient_in_the_groups_of_phi(tmp_path, monkeypatch):
    ages, sexes = [0.0, 70.0] * 20, ["F", "M"] * 20
    visits = [Visit(f"P{i}", f"V{i}", datetime(2020, 1, 1), Path("x"), "r", "ct", age) for i, age in enumerate(ages)]
    samples = [Sample(visit, None, sex, 1, "train") for visit, sex in zip(visits, sexes, strict=True)]
    samples[-1] = replace(samples[-1], visit=replace(visits[-1], age=None), sex=None)
    apart = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    apart[::2] += 20  # the young women
    drawn = []
    monkeypatch.setattr(section, "render", lambda name, **values: drawn.append(SimpleNamespace(**values)) or "page")
    monkeypatch.setattr(Chart, "figure", lambda chart: chart)
    path = section.write_phi_page(tmp_path, "site-1", 3, samples, apart)
    assert path.stat().st_mode & 0o077 == 0 and drawn[0].n == 40
    age, sex = drawn[0].figures
    points = {line.name: np.array([p[:2] for p in line.points if p[1] is not None]) for line in sex.drawn}
    assert {name: len(part) for name, part in points.items()} == {"women": 20, "men": 19, "unknown": 1}
    assert [line.name for line in age.drawn] == ["under 40", "60 to 79", "unknown"]
    among = np.concatenate([points["women"], points["men"]])
    nearest = np.linalg.norm(among[:, None] - among[None], axis=2) + 9 * np.eye(39)
    assert all((i < 20) == (j < 20) for i, j in enumerate(nearest.argmin(1)))
    assert all(len(run) == 1 for line in sex.series for run in line.runs)  # no line between patients
    assert not re.search(r"[PV]\d", str([line.points for chart in (age, sex) for line in chart.series]))
