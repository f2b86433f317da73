import stat
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from refused import refused

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Patient, Visit
from fedtar_flare.imaging.limits import Limits
from fedtar_flare.site.cohort import load_cohort, site_key
from fedtar_flare.site.site_file import SOURCES, Bounds, SiteConfig, default_bounds, load_site_config, read_site_file


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))


@pytest.fixture
def manifest(tmp_path):
    Image.fromarray(np.arange(100, dtype=np.uint8).reshape(10, 10)).save(tmp_path / "f.png")
    lines = ["patient_id,study_datetime,image,report,age,sex"]
    lines += [f"p{i % 20},2020-{1 + i // 20:02d}-01,f.png,Clear.,{40 + i % 20},F" for i in range(60)]
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    return tmp_path / "manifest.csv"


def write(place: Path, **content):
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(yaml.safe_dump({"policy": {}, **content}, explicit_end=True))
    return place


def test_no_site_trains_on_phantoms_by_accident(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_site_config("hospital-1", workspace=tmp_path / "kit", simulator=False)
    assert str(tmp_path / "kit" / "local" / "fedtar.yaml") in str(error.value)
    assert "source: manifest" in str(error.value) and str(tmp_path) not in error.value.public
    policy = Bounds(**default_bounds(simulated=True, synthetic=True))
    config = load_site_config("site-1", workspace=tmp_path, simulator=True)
    assert config == SiteConfig(source="synthetic", simulated=True, policy=policy)


def test_the_sites_folder_comes_before_the_workspace_and_a_misspelt_site_stops(tmp_path, monkeypatch):
    write(tmp_path / "kit" / "local" / "fedtar.yaml", source="synthetic", processes=7)
    assert load_site_config("a", workspace=tmp_path / "kit", simulator=False).processes == 7
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    assert load_site_config("a", workspace=tmp_path / "kit", simulator=False).processes == 7
    place = write(tmp_path / "sites" / "spain.yaml", source="synthetic", processes=9)
    assert load_site_config("spain", workspace=tmp_path / "kit", simulator=False).processes == 9
    with pytest.raises(ConfigError, match=r"spain\.yaml"):
        load_site_config("spian", workspace=None, simulator=True)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("FEDTAR_SITES", "sites")
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.chdir(tmp_path / "run")  # the simulator starts a site elsewhere than the command
    assert load_site_config("spain", workspace=None, simulator=True).origin == place


def test_paths_are_relative_to_the_file(manifest, tmp_path):
    others = {"cache_dir": "c", "state_dir": "/s", "exclude": "e"}
    config = read_site_file(place := write(tmp_path / "fedtar.yaml", source="manifest", path="manifest.csv", **others))
    assert config.path == manifest and config.cache_dir == tmp_path / "c"
    assert config.state_dir == Path("/s") and config.exclude == tmp_path / "e" and config.origin == place


@pytest.mark.parametrize(
    ("content", "words"), yaml.safe_load(Path(__file__).with_name("wrong_site_files.yaml").read_text())
)
def test_wrong_site_files_name_what_is_wrong(tmp_path, manifest, content, words):
    place = tmp_path / "fedtar.yaml"
    place.write_text(content, encoding="latin-1") if isinstance(content, str) else write(place, **content)
    with pytest.raises(ConfigError, match=words) as error:
        read_site_file(place)
    assert "fedtar.yaml" in str(error.value)


def cohort(config, tmp_path, **settings):
    settings = {"timeline": Timeline(2), "workspace": tmp_path / "kit", **settings}
    return load_cohort(config, "site-1", **settings)


def test_a_manifest_becomes_a_cohort(manifest, tmp_path):
    config = SiteConfig(source="manifest", path=manifest)
    made = cohort(config, tmp_path)
    assert len(made.patients) == 20 and made.modality == "radiograph"
    assert sum(map(sum, made.counts().values())) == 60
    assert cohort(config, tmp_path).samples("train") == made.samples("train")  # the key is made once
    timed = cohort(config, tmp_path, timeline=Timeline(2, "period", (datetime(2020, 2, 15),)))
    assert [sum(counts) for counts in zip(*timed.counts().values(), strict=True)] == [40, 20]
    manifest.write_text(manifest.read_text().replace("Clear.", "FINDINGS: Clear. IMPRESSION: 1. Normal."))
    options = {"sections": ["impression"], "cleaning": "r2gen-v1", "same_day": "merge"}
    read = cohort(config.replace(options=options), tmp_path)
    assert {visit.report for visit in read.visits} == {"normal ."}


def test_every_source_can_be_named_in_a_site_file(tmp_path):
    for source in (s for s in SOURCES if s != "synthetic"):
        config = read_site_file(write(tmp_path / "fedtar.yaml", source=source, path=".", options={"same_dy": "merge"}))
        with pytest.raises(ConfigError, match=f"source '{source}': unknown option 'same_dy'; did you mean 'same_day'"):
            cohort(config, tmp_path)


def test_a_simulated_site_splits_by_its_name_whatever_the_seed(manifest, tmp_path):
    config = SiteConfig(source="manifest", path=manifest, simulated=True)
    assert cohort(config, tmp_path).samples("test") == cohort(config, tmp_path / "x").samples("test")
    assert cohort(config, tmp_path).key == cohort(config, tmp_path, seed=1).key
    assert not (tmp_path / "kit").exists()


def test_excluded_patients_are_left_out_and_counted(manifest, tmp_path, caplog):
    (tmp_path / "withdrawn.txt").write_text("# since May\np3\n\n p7 \nnobody\n")
    manifest.write_text(manifest.read_text().replace("p7,", "p7^^^NORTH,"))
    made = cohort(SiteConfig(source="manifest", path=manifest, exclude=tmp_path / "withdrawn.txt"), tmp_path)
    assert {"p3", "p7^^^NORTH"}.isdisjoint(p.patient_id for p in made.patients)
    assert made.rejected == {"excluded": 6} and "1 id(s)" in caplog.text
    with pytest.raises(ConfigError, match="exclusion list"):
        cohort(SiteConfig(source="manifest", path=manifest, exclude=tmp_path / "nowhere.txt"), tmp_path)


def test_the_synthetic_cohort_gets_the_sites_options(monkeypatch, tmp_path):
    seen = {}
    visit = Visit("p", "v", datetime(2020, 1, 1), tmp_path, "Clear.", "ct")
    made = Cohort("a", [Patient("p", None, (visit,))], key=bytes(16), timeline=Timeline(2))
    monkeypatch.setattr(
        "fedtar_flare.synthetic.cohort.synthetic_cohort", lambda site, **settings: seen.update(settings) or made
    )
    cohort(SiteConfig(source="synthetic", options={"change": "none"}), tmp_path, seed=4, synthetic_patients=9)
    assert seen["patients"] == 9 and seen["seed"] == 4 and seen["options"].change == "none"
    assert seen["folder"] == tmp_path / "home" / "synthetic"
    with pytest.raises(ConfigError, match="did you mean 'change'"):
        cohort(SiteConfig(source="synthetic", options={"chang": "none"}), tmp_path)


def test_the_key_is_secret_kept_and_checked(tmp_path):
    key = site_key(tmp_path)
    assert len(key) == 32 and site_key(tmp_path) == key and site_key(tmp_path / "other") != key
    assert stat.S_IMODE((tmp_path / "fedtar.key").stat().st_mode) == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fedtar.key", "other"]
    for wrong in ("no key", "00ff"):
        (tmp_path / "fedtar.key").write_text(wrong)
        with refused("bad-key"):
            site_key(tmp_path)
    with get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(site_key, [tmp_path / "at once"] * 16))) == 1


@pytest.mark.parametrize("state_dir, where", [(None, "kit.fedtar_state"), ("state", "state")])
def test_the_key_lies_with_the_state(manifest, tmp_path, state_dir, where):
    config = SiteConfig(source="manifest", path=manifest, state_dir=state_dir and tmp_path / state_dir)
    cohort(config, tmp_path)
    assert [*tmp_path.rglob("fedtar.key")] == [tmp_path / where / "fedtar.key"], "not in the kit, which may be stolen"
    assert stat.S_IMODE((tmp_path / where).stat().st_mode) == 0o700


def test_the_policy_of_a_site_file_stands_over_the_defaults_of_such_a_site(tmp_path, manifest):
    real, place = {"source": "manifest", "path": "manifest.csv"}, tmp_path / "site.yaml"
    assert read_site_file(write(place, **real)).policy == Bounds()
    assert read_site_file(write(place, **real), simulated=True).policy.models_from == "anywhere"
    synthetic = Bounds(**default_bounds(simulated=False, synthetic=True))
    assert read_site_file(write(place, source="synthetic")).policy == synthetic
    policy = {"min_patients": 9, "max_rounds": None, "models": {"a": "models/a", "b": "/b", "c": None}}
    config = read_site_file(write(place, **real, policy=policy, limits={"voxels": 5}))
    models = {"a": tmp_path / "models" / "a", "b": Path("/b"), "c": None}
    assert config.policy == Bounds(min_patients=9, max_rounds=None, models=models) and config.limits == Limits(voxels=5)
    simulated = config.replace(simulated=True)
    assert (simulated.policy, simulated.limits) == (config.policy, config.limits)
    assert read_site_file(write(place, source="synthetic", policy=policy)).policy.min_local_steps == 1


def test_what_leaves_beyond_messages_is_the_site_s_own_choice():
    for source, simulated, shares, expected in (
        ("manifest", False, None, False), ("manifest", False, ["features"], True), ("manifest", True, None, True),
        ("synthetic", False, None, True), ("synthetic", True, ["features"], True), ("synthetic", True, [], False),
    ):  # fmt: skip
        config = SiteConfig(source=source, path=Path("m.csv"), simulated=simulated, shares=shares)
        assert config.shares_features is expected
