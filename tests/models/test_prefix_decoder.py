"""A causal language model that reads the image as a prefix, on a tiny random Llama."""

import shutil

import pytest
import torch
from batches import noise
from tiny_llama import write_llama

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.outline import outline

WIDTH, LENGTH = 16, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"), WIDTH)


def config_of(folder, **settings):
    named = {"decoder": "prefix", "decoder_name": str(folder), "tokenizer": "decoder", "max_length": LENGTH}
    return preset("tiny", **named | {"lora_targets": ["decoder.*.q_proj", "decoder.*.v_proj"]} | settings)


def batch():
    return noise(2, there=(4, 2))  # one of the images has fewer slices


IDS = torch.randint(3, 300, (2, 6), generator=torch.Generator().manual_seed(2))
IDS[:, 0] = 0


def by_hand(model, memory, mask, ids, prompts):
    """Logits of one report at a time: its own image tokens, begin token, prompts and words, and nothing else."""
    lm, all_logits = model.decoder.lm, []
    for i in range(len(ids)):
        words = lm.get_input_embeddings()(ids[i])
        before = [memory[i][mask[i]], words[:1], *([] if prompts is None else [prompts[i]])]
        logits = lm(inputs_embeds=torch.cat([*before, words[1:]])[None]).logits[0]
        all_logits.append(logits[-len(ids[i]) :])
    return torch.stack(all_logits)


@pytest.mark.parametrize("prompted", [False, True])
def test_logits_are_those_of_one_text_of_image_prompts_and_report(folder, prompted):
    model = build_model(config_of(folder))
    prompts = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)) if prompted else None
    with torch.no_grad():
        memory, mask = model.memory(batch(), model.encoded(batch()))
        logits, states = model.decode(memory, mask, IDS, prompts)
        torch.testing.assert_close(logits, by_hand(model, memory, mask, IDS, prompts), rtol=1e-4, atol=1e-5)
    assert states.shape == (2, 6, WIDTH)


def test_half_of_the_memory_in_bfloat16_and_a_loss_in_float32(folder):
    models = [build_model(config_of(folder, decoder_dtype=dtype)) for dtype in ("bfloat16", "float32")]
    assert {p.dtype for p in models[0].decoder.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        half, full = (model(batch(), IDS, IDS) for model in models)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0.25, atol=0.3)


def test_its_outline_needs_no_weights_and_bars_words_and_output(folder):
    config = config_of(folder)
    known = outline(config)
    assert known.parameters == sum(p.numel() for p in build_model(config).parameters())
    assert {"decoder.lm.lm_head", "decoder.lm.model.embed_tokens"} <= known.barred
    assert len(known.targeted(config.lora_targets)) == 4


@pytest.mark.parametrize(
    ("settings", "message"), [({"max_length": 97}, "96 positions"), ({"decoder": "gpt2"}, "GPT-2")]
)
def test_settings_that_do_not_fit_are_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_model(config_of(folder, **settings))


def test_a_draft_ends_at_each_of_several_ends(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7, 9]}')
    tokenizer = build_tokenizer(config_of(tmp_path))
    assert tokenizer.eos_id == 5
    assert {tokenizer.decode([0, 300, end, 301]) for end in (5, 7, 9)} == {tokenizer.decode([0, 300])}
    assert build_model(config_of(tmp_path))._settings(1, 1, 9).eos_token_id == [5, 7, 9]
