import re

import pytest
import yaml
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.registry import method, own_names
from fedtar_flare.suite.file import Suite, read_suite, shipped
from fedtar_flare.suite.plan import experiments, require_hospitals, site_config, site_files

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


def test_files_of_kept_results_can_be_run_but_for_those_of_scenarios(repository):
    for file in (repository / "docs" / "research" / "suites").glob("*.yaml"):
        if file.stem in ("alphas", "arrival", "joining", "spreading"):
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


@pytest.mark.parametrize(("change", "words"), cases(__file__, "refused.yaml"))
def test_what_cannot_be_run_is_refused_before_anything_runs(change, words):
    with pytest.raises(ConfigError, match=words):
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
    made_up = Suite(**SMALL, cohort={"patients": 3})
    with pytest.raises(ConfigError, match="unset FEDTAR_SITES"), site_files(made_up, tmp_path / "files"):
        pass


def test_site_files_of_a_suite_are_in_force_within_its_runs_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDTAR_SITES", raising=False)
    with site_files(Suite(**SMALL, cohort={"patients": 3, "site-2": {"patients": 4}}), tmp_path):
        assert [site_config(site).options["patients"] for site in ("site-1", "site-2")] == [3, 4]
    assert site_config("site-2").options == {}
