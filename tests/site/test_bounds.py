"""What a job may ask of a site: every bound is held against it, all at once, and every setting of a job has one."""

import re
import stat
from dataclasses import replace
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from refused import refused
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import Timeline
from fedtar_flare.imaging.limits import Limits
from fedtar_flare.learning.config import DataConfig, LoRAConfig, TrainingConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora, shared_state
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import TIMM_TARGETS, ModelConfig, preset
from fedtar_flare.models.outline import outline
from fedtar_flare.protocol.messages import MAX_TEXT
from fedtar_flare.registry import names
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.requirements import AdaptedModel
from fedtar_flare.site import admission
from fedtar_flare.site.admission import Declined, admit, breaches
from fedtar_flare.site.cohort import load_cohort, site_key
from fedtar_flare.site.site_file import Bounds, SiteConfig, default_bounds, load_site_config, read_site_file
from fedtar_flare.testing import executor_of

TABLES = yaml.safe_load(Path(__file__).with_name("bounds.yaml").read_text())
GROUPS = {"model": ModelConfig, "lora": LoRAConfig, "training": TrainingConfig, "data": DataConfig}
pytestmark = pytest.mark.usefixtures("own_home")
NO_EMBEDDING = "never the output layer or an embedding"


def asked(name="tiny", rounds=3, time_steps=3, candidates=1, **groups):
    """What a job of FedTAR with neither a patient part nor a diagnosis asks, and so many candidates."""
    groups = {"diagnosis": {"labeler": "none"}, "patient": {"enabled": False}} | groups
    request = executor_of("fedtar", preset=name, **groups).strategy.request(rounds, time_steps)
    return replace(request, beams={**request.beams, "diagnosis.candidates": candidates})


@pytest.mark.parametrize(("bounds", "job", "words"), [*([{}, *case] for case in TABLES["declined"]), *TABLES["own"]])
def test_a_job_beyond_a_bound_of_the_defaults_or_of_the_site_s_own_is_declined_by_its_name(bounds, job, words):
    """By each of several, where its words are a list."""
    reasons = breaches(asked(**job), Bounds(**bounds))
    words = words if isinstance(words, list) else [words] * bool(words)
    assert len(reasons) == len(words), reasons
    assert all(word in reason for word, reason in zip(words, reasons, strict=True)), reasons


@settings(max_examples=30)
@given(st.lists(st.text("ab (1)", min_size=1, max_size=150), min_size=1, max_size=25))
def test_reasons_fit_into_a_reply_and_say_how_many_are_left_out(found):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Declined) as caught:
        patch.setattr(admission, "breaches", lambda request, bounds: found)
        admit(None, None)
    error, said = caught.value, str(caught.value)
    assert len(said) <= MAX_TEXT and error.public == said and found[0] in said
    left = re.search(r"; and (\d+) more\Z", said)
    assert found[-1] in said or int(left[1]) >= 1
    if len(found) * 152 < 450:
        assert all(reason in said for reason in found)


@pytest.mark.parametrize("group", GROUPS)
def test_every_setting_of_a_job_has_a_bound_or_needs_none(group):
    free, extreme = TABLES["free"][group], TABLES["extreme"][group]
    assert set(GROUPS[group].model_fields) == set(free) | set(extreme) and not set(free) & set(extreme)
    for name, value in extreme.items():
        more = {"decoder_config": {"n_positions": 5000}} if name == "max_length" else {}
        assert breaches(asked(**{group: {name: value, **more}}), Bounds()), name


def test_layers_without_end_are_no_model():
    for wrong in ({"decoder_config": {"n_layer": 65}}, {"encoder_config": {"depth": [1, 32, 32]}}):
        with pytest.raises(ConfigError, match="64"):
            preset("tiny", **wrong)


SHIPPED = [*((name, "small", []) for name in names())]
SHIPPED += [("fedtar", "paper", ["model.encoder_name", "model.decoder_name"])]


@pytest.mark.parametrize(("name", "preset", "beyond"), SHIPPED)
def test_shipped_jobs_ask_for_nothing_but_the_paper_s_models(name, preset, beyond):
    recipe = MethodRecipe(name, preset=preset)
    request = recipe.executor.strategy.request(recipe.controller.config.num_rounds, recipe.controller.config.time_steps)
    assert [reason.split()[0] for reason in breaches(request, Bounds())] == beyond


def test_an_outline_is_the_model_itself():
    config, rank = preset("tiny"), 3
    made_of, model = outline(config), build_model(config)
    assert made_of.parameters == sum(p.numel() for p in model.parameters()) == sum(made_of.tensors.values())
    assert set(made_of.tensors) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    adapted = add_lora(model, targets=config.lora_targets, rank=rank, seed=0)
    values = made_of.lora_values(config.lora_targets, rank)
    assert values == sum(value.numel() for value in shared_state(adapted).values())
    executor = executor_of("fedtar", preset="tiny", lora={"rank": rank})
    own = sum(p.numel() for p in PatientLoRA(adapted, PatientConfig(), rank=rank, time_steps=9, seed=0).parameters())
    assert own == executor.strategy.adapted_model(9).personal_parameters(values)
    assert {"decoder.lm_head", "decoder.transformer.wte", "decoder.transformer.wpe"} <= made_of.barred


def test_layers_of_a_timm_encoder_may_be_adapted_but_not_its_embeddings():
    """A ViT's patch embedding sees pixels, its position embedding places."""
    config = preset("timm", weights="random", decoder_name=None, tokenizer="small", lora_targets=TIMM_TARGETS)
    bounds = Bounds(models={"vit_tiny_patch16_224": None})
    for exchange in ([], ["*pos_embed"], ["*patch_embed.proj.weight"]):
        reach = AdaptedModel(config, LoRAConfig(exchange=exchange)).reach
        found = breaches(replace(asked(), reach=reach), bounds)
        assert bool(found) == bool(exchange) and all(NO_EMBEDDING in reason for reason in found)


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


@pytest.mark.parametrize(("content", "words"), cases(__file__, "wrong_site_files.yaml"))
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
    timed = cohort(config, tmp_path, timeline=Timeline(2, "period", (datetime(2020, 2, 15),)))
    assert [sum(counts) for counts in zip(*timed.counts().values(), strict=True)] == [40, 20]
    manifest.write_text(manifest.read_text().replace("Clear.", "FINDINGS: Clear. IMPRESSION: 1. Normal."))
    options = {"sections": ["impression"], "cleaning": "r2gen-v1", "same_day": "merge"}
    read = cohort(config.replace(options=options), tmp_path)
    assert {visit.report for visit in read.visits} == {"normal ."}


def test_excluded_patients_are_left_out_and_counted(manifest, tmp_path, caplog):
    (tmp_path / "withdrawn.txt").write_text("# since May\np3\n\n p7 \nnobody\n")
    manifest.write_text(manifest.read_text().replace("p7,", "p7^^^NORTH,"))
    made = cohort(SiteConfig(source="manifest", path=manifest, exclude=tmp_path / "withdrawn.txt"), tmp_path)
    assert {"p3", "p7^^^NORTH"}.isdisjoint(p.patient_id for p in made.patients)
    assert made.rejected == {"excluded": 6} and "1 id(s)" in caplog.text
    with pytest.raises(ConfigError, match="exclusion list"):
        cohort(SiteConfig(source="manifest", path=manifest, exclude=tmp_path / "nowhere.txt"), tmp_path)


def test_the_key_is_secret_kept_and_checked(tmp_path):
    key = site_key(tmp_path)
    assert len(key) == 32 and site_key(tmp_path) == key and site_key(tmp_path / "other") != key
    assert stat.S_IMODE((tmp_path / "fedtar.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o700
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fedtar.key", "other"]
    for wrong in ("no key", "00ff"):
        (tmp_path / "fedtar.key").write_text(wrong)
        with refused("bad-key"):
            site_key(tmp_path)
    with get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(site_key, [tmp_path / "at once"] * 16))) == 1


def test_the_policy_of_a_site_file_stands_over_the_defaults_of_such_a_site(tmp_path, manifest):
    real, place = {"source": "manifest", "path": "manifest.csv"}, tmp_path / "site.yaml"
    assert read_site_file(write(place, **real)).policy == Bounds()
    assert read_site_file(write(place, **real), simulated=True).policy.models_from == "anywhere"
    synthetic = Bounds(**default_bounds(simulated=False, synthetic=True))
    assert read_site_file(write(place, source="synthetic")).policy == synthetic
    assert (synthetic.models_from, synthetic.max_seconds) == ("list", Bounds().max_seconds), "the job is another's"
    policy = {"min_patients": 9, "max_rounds": None, "models": {"a": "models/a", "b": "/b", "c": None}}
    config = read_site_file(write(place, **real, policy=policy, limits={"voxels": 5}))
    models = {"a": tmp_path / "models" / "a", "b": Path("/b"), "c": None}
    assert config.policy == Bounds(min_patients=9, max_rounds=None, models=models) and config.limits == Limits(voxels=5)
    simulated = config.replace(simulated=True)
    assert (simulated.policy, simulated.limits) == (config.policy, config.limits)
    assert read_site_file(write(place, source="synthetic", policy=policy)).policy.min_local_steps == 1
