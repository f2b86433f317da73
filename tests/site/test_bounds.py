"""What a job may ask of a site: every bound is held against it, all at once, and every setting of a job has one."""

import re
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.config import DataConfig, LoRAConfig, TrainingConfig
from fedtar_flare.methods.fedtar.config import PatientConfig
from fedtar_flare.methods.fedtar.patient_lora import PatientLoRA
from fedtar_flare.models.adapters.lora import add_lora, shared_state
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import TIMM_TARGETS, ModelConfig, asset, preset
from fedtar_flare.models.outline import outline
from fedtar_flare.protocol.messages import MAX_TEXT
from fedtar_flare.registry import names
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.requirements import AdaptedModel
from fedtar_flare.site import admission
from fedtar_flare.site.admission import Declined, admit, breaches
from fedtar_flare.site.site_file import Bounds, default_bounds
from fedtar_flare.testing import executor_of

HUB = "some-lab/some-model"
NO_EMBEDDING = "never the output layer or an embedding"


def asked(name="tiny", rounds=3, time_steps=3, candidates=1, **groups):
    """What a job of FedTAR with neither a patient part nor a diagnosis asks, and so many candidates."""
    groups = {"diagnosis": {"labeler": "none"}, "patient": {"enabled": False}} | groups
    request = executor_of("fedtar", preset=name, **groups).strategy.request(rounds, time_steps)
    return replace(request, beams={**request.beams, "diagnosis.candidates": candidates})


def only(reasons, words):
    assert len(reasons) == 1 and words in reasons[0], reasons


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"training": {"local_steps": 3}}, "training.local_steps 3 (at least 4)"),
        ({"training": {"batch_size": 3}}, "training.batch_size 3 (at least 4)"),
        ({"training": {"max_grad_norm": 1e-8}}, "training.max_grad_norm 1e-08 (at least 0.1)"),
        ({"lora": {"rank": 4, "alpha": 0.01}}, "lora.alpha / rank 0.0025 (at least 0.1)"),
        ({"training": {"lr": 0.2, "weight_decay": 0.0}}, "training.lr 0.2 (at most 0.1)"),
        ({"training": {"lr": 0.01, "weight_decay": 100.0}}, "training.lr x weight_decay 1 (at most 0.1)"),
        ({"model": {"lora_targets": ["decoder.lm_head"]}}, f"reaches decoder.lm_head ({NO_EMBEDDING})"),
        ({"model": {"lora_targets": ["*"]}}, NO_EMBEDDING),
        ({"model": {"lora_targets": ["decoder.transformer.wpe"]}}, f"decoder.transformer.wpe ({NO_EMBEDDING})"),
        ({"lora": {"exchange": ["decoder.transformer.wte.weight"]}}, f"wte.weight ({NO_EMBEDDING})"),
        ({"lora": {"exchange": ["decoder.lm_head.*"]}}, f"lm_head.weight ({NO_EMBEDDING})"),
        ({"lora": {"exchange": ["*embedding*weight"]}}, NO_EMBEDDING),
        ({"lora": {"rank": 65}}, "lora.rank 65 (at most 64)"),
        ({"model": {"image_size": 4096, "slices": 2}}, "pixels of a study 33,554,432 (at most"),
        ({"model": {"decoder_config": {"n_positions": 1025}}}, "model.decoder_positions 1,025 (at most 1,024)"),
        ({"model": {"queries": 300}}, "model.slices x queries 1,200 (at most 1,024)"),
        ({"model": {"num_beams": 17}}, "model.num_beams 17 (at most 16)"),
        ({"model": {"decoder_config": {"n_embd": 1 << 14}}}, "(at most 1,000,000,000)"),
        ({"model": {"encoder_config": {"embed_dim": [8192, 8192, 8192]}}}, "(at most 1,000,000,000)"),
        ({"model": {"encoder_name": HUB}}, f"model.encoder_name '{HUB}' (not among this site's models)"),
        ({"model": {"decoder_name": "/etc"}}, "model.decoder_name '/etc' (not among this site's models)"),
        ({"model": {"weights": "../x.safetensors"}}, "model.weights '../x.safetensors' (not among"),
        ({"model": {"tokenizer": "t.json"}}, "model.tokenizer 't.json' (not among this site's models)"),
    ],
)  # fmt: skip
def test_a_job_beyond_a_bound_is_declined_by_its_name(job, words):
    only(breaches(asked(**job), Bounds()), words)


@pytest.mark.parametrize(
    ("bounds", "job", "words"),
    [
        ({"min_local_steps": 1, "min_batch_size": 1}, {"training": {"local_steps": 2, "batch_size": 2}},
         "reports of an update 4 (at least 5 patients)"),
        ({"min_local_steps": 1, "min_batch_size": 1}, {"training": {"local_steps": 3, "batch_size": 2}}, ""),
        ({}, {"training": {"max_grad_norm": 0.0}}, ""),  # no clipping is no tiny clip
        ({"lora_targets": ["decoder.*.c_attn"]}, {}, "(only 'decoder.*.c_attn')"),
        ({"lora_targets": ["decoder.*.c_attn"]}, {"model": {"lora_targets": ["decoder.*.0.attn.c_attn"]}}, ""),
        ({"lora_targets": ["*lm_head"]}, {"model": {"lora_targets": ["decoder.lm_head"]}}, NO_EMBEDDING),
        ({"min_noise_multiplier": 1.0}, {"training": {"noise_multiplier": None}}, "training.noise_multiplier "),
        ({"min_noise_multiplier": 1.0}, {"training": {"noise_multiplier": 0.5}}, "training.noise_multiplier "),
        ({"min_noise_multiplier": 1.0}, {"training": {"noise_multiplier": 1.0}}, ""),
    ],
)  # fmt: skip
def test_a_site_sets_its_own_bounds(bounds, job, words):
    reasons = breaches(asked(**job), Bounds(**bounds))
    assert len(reasons) == bool(words) and all(words in reason for reason in reasons), reasons


def test_layers_are_looked_at_although_the_model_is_not_the_site_s():
    foreign, layer = breaches(asked(model={"encoder_name": HUB, "lora_targets": ["*.lm_head"]}), Bounds())
    assert "not among" in foreign and NO_EMBEDDING in layer


def test_what_a_site_names_may_come_and_nothing_else_is_taken_for_it(tmp_path):
    bounds = Bounds(models={"start": tmp_path})
    shutil.copy(asset("small", "tokenizer.json", "tokenizer"), tmp_path)
    assert not breaches(asked(model={"weights": "start", "tokenizer": "start"}), bounds)
    only(breaches(asked(model={"weights": "./start"}), bounds), "not among")
    located = preset("tiny", weights="start", tokenizer="start").with_local_paths(bounds.models)
    assert (located.weights, located.tokenizer) == (f"{tmp_path}/model.safetensors", f"{tmp_path}/tokenizer.json")
    shipped = preset("small").with_local_paths({"small": tmp_path})
    assert shipped.weights == "small", "the shipped model is always the shipped one"


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


TARGETS = {  # layers of the tiny model that the globs pick: is one of them barred?
    ("decoder.*.c_attn",): False,
    ("encoder.*.dense", "decoder.*.c_proj"): False,
    ("*", "!*embed*", "!*.lm_head", "!*.w[tp]e"): False,
    ("decoder.lm_head",): True,
    ("*[dek]",): True,
    ("decoder.transformer.?te",): True,
}
EXCHANGED = {(): False, ("projection.weight",): False, ("x", "*.wte.*"): True, ("*lm_head*",): True}
positive = st.floats(1e-9, 100, allow_nan=False)
JOBS = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 12), "batch": st.integers(1, 12), "clip": st.one_of(st.just(0.0), positive),
        "alpha": positive, "rank": st.integers(1, 8), "lr": positive, "decay": positive,
        "rounds": st.integers(1, 30), "time_steps": st.integers(1, 9),
        "beams": st.integers(1, 9), "candidates": st.integers(1, 9),
        "length": st.integers(3, 96), "slices": st.integers(1, 6),
        "targets": st.sampled_from(sorted(TARGETS)), "exchange": st.sampled_from(sorted(EXCHANGED)),
        "weights": st.sampled_from([None, "start", "/start", "Start"]),
    }
)  # fmt: skip
low, high = st.integers(1, 10), st.one_of(st.none(), st.integers(1, 12))
SITES = st.fixed_dictionaries(
    {
        "min_patients": st.integers(1, 60), "min_local_steps": low, "min_batch_size": low,
        "min_gradient_scale": st.floats(0, 5), "min_learning_rate": st.floats(0, 1e-3),
        "max_learning_rate": st.one_of(st.none(), positive),
        "max_rank": high, "max_rounds": high, "max_time_steps": high, "max_beams": high,
        "max_tokens": st.one_of(st.none(), st.integers(96, 100)),
        "max_pixels": st.one_of(st.none(), st.integers(1000, 7000)),
        "max_parameters": st.one_of(st.none(), st.integers(100_000, 150_000)),
        "models_from": st.sampled_from(["list", "anywhere"]), "models": st.sampled_from([{}, {"start": None}]),
    }
)  # fmt: skip


def beyond(job, site):
    """By hand, which of the site's bounds the job is beyond; without the number of parameters."""
    scale, update = job["alpha"] / job["rank"], job["steps"] * job["batch"]
    least = [
        ("min_patients", update), ("min_local_steps", job["steps"]), ("min_batch_size", job["batch"]),
        ("min_gradient_scale", job["clip"] or float("inf")), ("min_gradient_scale", scale),
        ("min_learning_rate", job["lr"]),
    ]  # fmt: skip
    most = [
        ("max_learning_rate", job["lr"]), ("max_learning_rate", job["lr"] * job["decay"]), ("max_rank", job["rank"]),
        ("max_rounds", job["rounds"]), ("max_time_steps", job["time_steps"]), ("max_beams", job["beams"]),
        ("max_beams", job["candidates"]), ("max_tokens", 96), ("max_pixels", job["slices"] * 32 * 32),
    ]  # fmt: skip
    found = [name for name, value in least if value < site[name]]
    found += [name for name, value in most if site[name] is not None and value > site[name]]
    found += ["targets"] * TARGETS[job["targets"]] + ["exchange"] * EXCHANGED[job["exchange"]]
    strange = job["weights"] and site["models_from"] == "list" and job["weights"] not in site["models"]
    return found + ["weights"] * bool(strange)


@settings(max_examples=60)
@given(JOBS, SITES)
def test_no_job_beyond_a_bound_is_ever_let_in(job, site):
    made = asked(
        rounds=job["rounds"],
        time_steps=job["time_steps"],
        candidates=job["candidates"],
        lora={"rank": job["rank"], "alpha": job["alpha"], "exchange": job["exchange"]},
        training={
            "local_steps": job["steps"], "batch_size": job["batch"], "max_grad_norm": job["clip"],
            "lr": job["lr"], "weight_decay": job["decay"],
        },
        model={
            "num_beams": job["beams"], "max_length": job["length"], "slices": job["slices"],
            "lora_targets": job["targets"], "weights": job["weights"],
        },
    )  # fmt: skip
    found = breaches(made, Bounds(**site))
    sized = [reason for reason in found if reason.startswith("parameters ")]
    expected = beyond(job, site)
    assert len(found) - len(sized) == len(expected), (expected, found)
    if "weights" not in expected:
        made_of = outline(preset("tiny", slices=job["slices"], max_length=job["length"]))
        size = made_of.parameters + made_of.lora_values(job["targets"], job["rank"])
        assert bool(sized) == (site["max_parameters"] is not None and size > site["max_parameters"])


FREE = {
    ModelConfig: {
        "preset": "a label", "image_statistics": "one of three", "encoder": "one of two families",
        "decoder": "one of two, and the second takes a name", "decoder_dtype": "one of two",
        "pooling": "one of two", "seed": "a number", "family": "one of two", "slice_view": "one of two",
        "prompt": "at most 2,000 characters", "lateral": "yes or no",
    },
    LoRAConfig: {"dtype_up": "one of two", "mean": "one of three"},
    TrainingConfig: {
        "local_epochs": "a site makes its min_local_steps", "seconds": "likewise", "augment": "yes or no",
        "micro_batch": "at most the batch",
        "schedule": "only lowers the rates", "gradient_checkpointing": "yes or no",
        "noise_multiplier": "noise only protects, and a site may demand it",
    },
    DataConfig: {
        "alignment": "one of two", "periods": "as many as time steps", "prior": "what is shown to the model",
        "priors": "at most eight",
        "min_cell": "a site takes the larger one, its own or this", "synthetic_patients": "of no hospital",
        "replay_share": "a real site learns from whole periods: 0 or 1",
        "image_changes": "a real site refuses it", "transforms": "of a closed list, and a site names its own",
    },
}  # fmt: skip
EXTREME = {
    ModelConfig: {
        "image_size": 1 << 20, "slices": 5000, "queries": 5000, "encoder_name": HUB, "decoder_name": HUB,
        "encoder_config": {"embed_dim": [1 << 14] * 3}, "decoder_config": {"n_embd": 1 << 15, "n_positions": 5000},
        "tokenizer": "/t.json", "weights": "/w", "max_length": 5000, "num_beams": 5000, "lora_targets": ["*"],
    },
    LoRAConfig: {"rank": 5000, "alpha": 1e-9, "exchange": ["*"]},
    TrainingConfig: {
        "local_steps": 1, "batch_size": 1, "lr": 1e-12, "weight_decay": 1e6, "max_grad_norm": 1e-9,
    },
    DataConfig: {},
}  # fmt: skip


@pytest.mark.parametrize("group", FREE)
def test_every_setting_of_a_job_has_a_bound_or_needs_none(group):
    assert set(group.model_fields) == set(FREE[group]) | set(EXTREME[group])
    assert not set(FREE[group]) & set(EXTREME[group])
    for name, value in EXTREME[group].items():
        more = {"decoder_config": {"n_positions": 5000}} if name == "max_length" else {}
        values = {ModelConfig: "model", LoRAConfig: "lora", TrainingConfig: "training"}[group]
        assert breaches(asked(**{values: {name: value, **more}}), Bounds()), name


def test_what_a_method_trains_for_itself_is_bounded_too_and_layers_without_end_are_no_model():
    rates = {1.0: "patient.lr 1 (at most 0.1)", 1e-12: "patient.lr 1e-12 (at least 1e-05)"}
    for patient, words in (({"components": 10**8}, "parameters "), *(({"lr": lr}, word) for lr, word in rates.items())):
        only(breaches(asked(patient=patient), Bounds()), words)
        assert not breaches(asked(patient=patient | {"enabled": False}), Bounds())
    for wrong in ({"decoder_config": {"n_layer": 65}}, {"encoder_config": {"depth": [1, 32, 32]}}):
        with pytest.raises(ConfigError, match="64"):
            preset("tiny", **wrong)


@pytest.mark.parametrize(
    ("name", "preset", "beyond"),
    [*((name, "small", []) for name in names()), ("fedtar", "paper", ["model.encoder_name", "model.decoder_name"])],
)
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


def test_bounds_that_are_looser_than_the_defaults_are_told():
    assert Bounds().looser() == []
    assert not Bounds(min_patients=9, max_rounds=3, max_learning_rate=0.01, models={"a": None}).looser()
    loose = Bounds(min_patients=4, max_rounds=None, models_from="anywhere", max_learning_rate=0.2)
    assert loose.looser() == ["max_learning_rate", "max_rounds", "min_patients", "models_from"]
    for site in ({"simulated": True, "synthetic": False}, {"simulated": False, "synthetic": True}):
        assert Bounds(**default_bounds(**site)).looser()
    assert default_bounds(simulated=False, synthetic=False) == {}
    assert not {"models_from", "max_seconds"} & set(default_bounds(simulated=False, synthetic=True))
