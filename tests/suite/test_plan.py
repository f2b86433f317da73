import re

import pytest
import yaml

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.registry import method, own_names
from fedtar_flare.suite.file import Suite, read_suite, shipped
from fedtar_flare.suite.plan import experiments, require_hospitals, site_config, site_files, variants

SUITES = sorted(shipped().values())
REPORTS = {name for name in own_names() if method(name).reports}
ARMS = {"local": {"method": "local"}, "fedavg": {"method": "fedavg"}}
SMALL = {"name": "s", "sites": ["site-1", "site-2", "site-3"], "settings": {"preset": "tiny"}, "arms": ARMS}


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_recipe_of_a_shipped_suite_can_be_built_and_its_documents_say_how_many_runs_it_has(
    path, repository, tmp_path, monkeypatch
):
    (tmp_path / path.stem).mkdir()  # the folder of its results
    monkeypatch.chdir(tmp_path)
    suite = read_suite(path.stem)
    assert suite == read_suite(path)
    planned = experiments(suite)
    assert len({one.file_name for one in planned}) == len(planned)
    if said := re.search(r"(\d+) runs\.", path.read_text().split("name:")[0]):
        assert int(said[1]) == len(planned)
    lines = (repository / "docs" / "research" / "suites.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("|") and f"`{path.stem}`" in line)
    assert str(len(planned)) in re.findall(r"\d+", row.rpartition("|")[0].rpartition("|")[2])
    if path.stem in ("quick", "paper_tables"):  # the suites of all methods that write reports
        assert {arm["method"] for arm in suite.arms.values()} == REPORTS
        assert len({one.digest for one in planned}) == len(planned), "no two arms are equal"


def test_files_of_kept_results_can_be_run_but_for_those_whose_visits_arrive(repository):
    for file in (repository / "docs" / "research" / "suites").glob("*.yaml"):
        if file.stem in ("arrival", "spreading"):
            with pytest.raises(ConfigError):
                experiments(read_suite(file))
        else:
            assert experiments(read_suite(file))


def test_a_result_is_made_again_for_another_value_of_a_setting_and_for_a_default_that_changes(monkeypatch):
    def digest(**settings):
        arms = {"a": {"method": "fedtar", "settings": settings}}
        return experiments(Suite(name="s", sites=["site-1"], arms=arms))[0].digest

    before = digest()
    assert before == digest(patient={"components": 16}) == digest(server={"eta": 0.01}) != digest(server={"eta": 0.02})
    monkeypatch.setitem(method("fedtar").presets["small"], "patient", {"components": 4})
    assert digest() != before


def test_lists_of_a_scenario_stand_for_every_combination():
    grid = {"sites": [1, 3], "cohort": {"patients": [12, 24], "own_words": [0.0, 1.0]}}
    found = variants(Suite(**SMALL, scenarios={"grid": grid}, cohort={"patients": 7, "change": "none"}))
    assert len({v.name for v in found}) == len(found) == 8
    for variant in found:
        point = variant.point
        assert variant.sites == ("site-1", "site-2", "site-3")[: point["hospitals"]]
        wanted = {"change": "none", "patients": point["patients"], "own_words": point["own_words"]}
        assert variant.cohort == dict.fromkeys(variant.sites, wanted) and variant.compared == ("site-1",)


def test_a_scenario_is_about_the_hospitals_that_it_names():
    odd = {"joins": {"site-2": 2}, "cohort": {"site-2": {"patients": 3}}}
    suite = SMALL | {"cohort": {"patients": 9, "site-1": {"patients": 8}}}
    found, fewer, own = variants(Suite(**suite, scenarios={"Small & late": odd, "of 2": odd | {"sites": [2]}, "": {}}))
    assert (fewer.sites, fewer.joins) == (("site-1", "site-2"), found.joins)
    assert found.joins == {"site-2": 2} and found.compared == fewer.compared == ("site-2",)
    patients = {site: options["patients"] for site, options in found.cohort.items()}
    assert patients == {"site-1": 8, "site-2": 3, "site-3": 9}
    assert (found.name, own.scenario, own.sites) == ("small-late", "", tuple(SMALL["sites"]))


def test_an_arm_that_shares_nothing_is_run_where_its_result_is_read_alone():
    scenarios = {
        "grid": {"sites": [2, 3], "cohort": {"patients": [12, 24]}},
        "small": {"cohort": {"site-2": {"patients": 3}}},
        "late": {"joins": {"site-1": 2}},
    }
    planned = experiments(Suite(**SMALL, scenarios=scenarios))
    alone = {one.variant.name: one for one in planned if one.name == "local"}
    assert {name: one.sites for name, one in alone.items()} == {
        "hospitals-2_patients-12": ("site-1", "site-2"),
        "hospitals-2_patients-24": ("site-1", "site-2"),
        "small": ("site-2",),
        "late": ("site-1", "site-2"),  # no run begins without a hospital
    }
    assert alone["small"].variant.cohort == {"site-2": {"patients": 3}} and alone["late"].variant.joins == {"site-1": 2}
    together = [one for one in planned if one.name == "fedavg"]
    assert sorted(len(one.sites) for one in together) == [2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": {"a": {"method": "fedavgg"}}}, "did you mean 'fedavg'"),
        ({"arms": {"a": {"method": "fedavg", "settings": {"trainng": {}}}}}, "arm 'a'"),
        ({"arms": {"A b": {"method": "fedavg"}}}, "lower-case"),
        ({"arms": {}}, "arms"),
        ({"outside": ["site-1"]}, "outside"),
        ({"seeds": [1, 1]}, "different"),
        ({"references": ["b"]}, "some of the arms"),
        ({"references": ["fedavg", "fedavg"]}, "each once"),
        ({"sitess": ["a"]}, "did you mean 'sites'"),
        ({"scenarios": {"a": {"cohort": {"patient": [1]}}}}, "did you mean 'patients'"),
        ({"scenarios": {"a": {"site": [1]}}}, "scenario 'a': unknown setting 'site'; did you mean 'sites'"),
        ({"scenarios": {"a": {"sites": [4]}}}, "from 1 to 3"),
        ({"scenarios": {"a": {"sites": [0]}}}, "sites is"),
        ({"scenarios": {"a": {"joins": {"site-1": 0}}}}, "joins is"),
        ({"scenarios": {"a": {"joins": {"site-9": 2}}}}, "is no 'site-9'"),
        ({"scenarios": {"a": {"joins": {"site-2": 9}}}}, "after the last round"),
        ({"scenarios": {"a": {"sites": [2], "cohort": {"site-3": {"patients": 3}}}}}, "is no 'site-3'"),
        ({"settings": {"preset": "tiny", "server": {"rounds_per_period": 1}}}, "rounds_per_period"),
        ({"cohort": {"own_word": 1}}, "did you mean 'own_words'"),
        ({"cohort": {"site-9": {"patients": 1}}}, "'site-9' is none"),
        ({"needs_site_files": True, "cohort": {"patients": 3}}, "needs_site_files"),
        ({"needs_site_files": True, "scenarios": {"a": {"cohort": {"patients": 3}}}}, "needs_site_files"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(change, said):
    with pytest.raises(ConfigError, match=said):
        experiments(Suite(**{**SMALL, **change}))


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
    first = variants(Suite(**SMALL, cohort={"patients": 3}))[0]
    with pytest.raises(ConfigError, match="unset FEDTAR_SITES"), site_files(first, tmp_path / "files"):
        pass


def test_site_files_of_a_variant_are_in_force_within_its_run_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDTAR_SITES", raising=False)
    variant = variants(Suite(**SMALL, cohort={"patients": 3, "site-2": {"patients": 4}}))[0]
    with site_files(variant, tmp_path):
        assert [site_config(site).options["patients"] for site in ("site-1", "site-2")] == [3, 4]
    assert site_config("site-2").options == {}
