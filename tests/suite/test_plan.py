import re
from pathlib import Path

import pytest
import yaml

from fedtar_flare.errors import ConfigError
from fedtar_flare.fedtar.recipe import FedTARRecipe
from fedtar_flare.methods import METHODS
from fedtar_flare.suite.file import Suite, read_suite
from fedtar_flare.suite.hospitals import described, require_hospitals, site_config
from fedtar_flare.suite.plan import cells
from fedtar_flare.suite.variants import variants

SUITES = sorted((Path(__file__).parents[2] / "docs" / "suites").glob("*.yaml"))
REPORTS = {name for name in METHODS if METHODS[name].reports}
ARMS = {"local": {"method": "local"}, "fedavg": {"method": "fedavg"}}
SMALL = {"name": "s", "sites": ["site-1", "site-2", "site-3"], "settings": {"preset": "tiny"}, "arms": ARMS}


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_recipe_of_a_shipped_suite_can_be_built(path):
    suite = read_suite(path)
    planned = cells(suite)
    assert len({cell.file_name for cell in planned}) == len(planned)
    if said := re.search(r"(\d+) runs\.", path.read_text().split("name:")[0]):
        assert int(said[1]) == len(planned)


def test_the_list_of_suites_has_each_with_its_number_of_runs():
    lines = (SUITES[0].parent / "README.md").read_text().splitlines()
    for path in SUITES:
        (row,) = (line for line in lines if line.startswith("|") and f"`{path.stem}`" in line)
        assert str(len(cells(read_suite(path)))) in re.findall(r"\d+", row.rpartition("|")[0].rpartition("|")[2])


def test_the_quick_suite_runs_every_method_that_writes_reports():
    suite = read_suite(next(path for path in SUITES if path.stem == "quick"))
    assert {arm["method"] for arm in suite.arms.values()} == REPORTS


def test_the_paper_tables_have_every_method_and_no_two_equal_arms():
    suite = read_suite(next(path for path in SUITES if path.stem == "paper_tables"))
    assert {arm["method"] for arm in suite.arms.values()} == REPORTS and len(suite.seeds) == 5
    assert len({cell.digest for cell in cells(suite)}) == len(cells(suite))


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"patient": {"components": 16}}, True),
        ({"server": {"eta": 0.01}}, True),
        ({"training": {"focus": 2.0}}, True),
        ({"patient": {"components": 15}}, False),
        ({"server": {"eta": 0.02}}, False),
        ({"server": {"weighting": "uniform"}}, False),
        ({"training": {"focus": 1.0}}, False),
    ],
)
def test_a_result_is_made_again_only_for_another_value_of_a_setting(settings, same):
    suite = {"name": "s", "sites": ["site-1"], "arms": {"a": {"method": "fedtar"}}}
    other = suite | {"arms": {"a": {"method": "fedtar", "settings": settings}}}
    (one,), (two,) = cells(Suite(**suite)), cells(Suite(**other))
    assert (one.digest == two.digest) is same


def test_a_default_that_changes_makes_a_result_again(monkeypatch):
    suite = Suite(name="s", sites=["site-1"], arms={"a": {"method": "fedtar"}})
    (before,) = cells(suite)
    monkeypatch.setitem(FedTARRecipe.presets["small"], "patient", {"components": 4})
    (after,) = cells(suite)
    assert before.recipe == after.recipe and before.digest != after.digest


def test_a_grid_is_every_combination_of_its_values():
    grid = {"patients": [12, 24], "hospitals": [1, 3], "own_words": [0.0, 1.0]}
    found = variants(Suite(**SMALL, grid=grid, cohort={"patients": 7, "change": "none"}))
    assert len({v.name for v in found}) == len(found) == 8
    for variant in found:
        values = variant.values
        assert variant.sites == ("site-1", "site-2", "site-3")[: values["hospitals"]]
        wanted = {"change": "none", "patients": values["patients"], "own_words": values["own_words"]}
        assert variant.cohort == dict.fromkeys(variant.sites, wanted)


def test_a_case_differs_in_its_hospitals_alone():
    case = {
        "label": "small and late",
        "about": "site-2",
        "hospitals": {"site-2": {"joins": 2, "cohort": {"patients": 3}}},
    }
    (found,) = variants(Suite(**SMALL, cases={"odd": case}, cohort={"patients": 9}))
    (fewer,) = variants(Suite(**SMALL, cases={"odd": case | {"among": 2}}, cohort={"patients": 9}))
    assert (fewer.sites, fewer.joins) == (("site-1", "site-2"), found.joins)
    assert found.joins == {"site-2": 2}
    assert {site: options["patients"] for site, options in found.cohort.items()} == {
        "site-1": 9,
        "site-2": 3,
        "site-3": 9,
    }


def test_an_arm_that_shares_nothing_is_run_where_its_result_is_read_alone():
    grid = {"patients": [12, 24], "hospitals": [2, 3]}
    cases = {
        "small": {"label": "small", "about": "site-2", "hospitals": {"site-2": {"cohort": {"patients": 3}}}},
        "late": {"label": "late", "about": "site-1", "hospitals": {"site-1": {"joins": 2}}},
    }
    planned = cells(Suite(**SMALL, grid=grid, cases=cases))
    alone = {cell.variant.name: cell for cell in planned if cell.name == "local"}
    assert {name: cell.sites for name, cell in alone.items()} == {
        "patients-12_hospitals-2": ("site-1", "site-2"),
        "patients-24_hospitals-2": ("site-1", "site-2"),
        "small": ("site-2",),
        "late": ("site-1", "site-2"),  # no run begins without a hospital
    }
    assert alone["small"].variant.cohort == {"site-2": {"patients": 3}} and alone["late"].variant.joins == {"site-1": 2}
    together = [cell for cell in planned if cell.name == "fedavg"]
    assert sorted(len(cell.sites) for cell in together) == [2, 2, 3, 3, 3, 3]


def test_each_hospital_is_left_out_once_of_every_arm_that_shares_something():
    planned = cells(Suite(**SMALL, leave_one_out=True, cohort={"patients": 4}))
    turns = [cell for cell in planned if cell.variant.values]
    assert {cell.name for cell in turns} == {"fedavg"} and len(planned) == 5
    for cell in turns:
        assert cell.variant.outside == (cell.variant.values["left_out"],)
        assert {*cell.sites, *cell.variant.outside} == set(SMALL["sites"]) and len(cell.sites) == 2
        assert cell.variant.cohort == {site: {"patients": 4} for site in SMALL["sites"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grid": {"patient": [1]}}, "patients, hospitals, own_words"),
        ({"grid": {"hospitals": [4]}}, "from 1 to 3"),
        ({"cohort": {"own_word": 1}}, "did you mean 'own_words'"),
        ({"hospitals": {"site-9": {"joins": 2}}}, "alone"),
        ({"hospitals": {"site-2": {"joins": 9}}}, "after the last round"),
        ({"cases": {"a": {"label": "a", "about": "site-9"}}}, "about one of the sites"),
        ({"cases": {"a": {"label": "a", "about": "site-3", "among": 2}}}, "there is no site-3"),
        ({"needs_site_files": True, "cohort": {"patients": 3}}, "needs_site_files"),
        ({"sites": ["site-1"], "leave_one_out": True}, "leave_one_out"),
    ],
)
def test_hospitals_that_do_not_fit_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        cells(Suite(**{**SMALL, **change}))


def test_real_data_is_asked_for_before_anything_runs(tmp_path, monkeypatch):
    suite = Suite(**SMALL, needs_site_files=True)
    monkeypatch.delenv("FEDTAR_SITES", raising=False)
    with pytest.raises(ConfigError, match="set FEDTAR_SITES"):
        require_hospitals(suite)
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no site-1\.yaml"):
        require_hospitals(suite)
    for site in suite.sites:
        (tmp_path / f"{site}.yaml").write_text(yaml.safe_dump({"source": "synthetic"}))
    with pytest.raises(ConfigError, match="not on phantoms"):
        require_hospitals(suite)
    described_one = variants(Suite(**SMALL, cohort={"patients": 3}))[0]
    with pytest.raises(ConfigError, match="unset FEDTAR_SITES"), described(described_one, tmp_path / "files"):
        pass


def test_site_files_of_a_variant_are_in_force_within_its_run_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDTAR_SITES", raising=False)
    variant = variants(Suite(**SMALL, cohort={"patients": 3}))[0]
    with described(variant, tmp_path):
        assert site_config("site-2").options == {"patients": 3}
    assert site_config("site-2").options == {}
