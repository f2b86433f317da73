"""A causal language model that reads the image as a prefix, on a tiny random Llama."""

import json
import shutil

import pytest
import torch
from batches import greedy, noise, rows, whole
from tiny_llama import write_llama

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.models.build import build_model
from fedtar_flare.models.config import preset
from fedtar_flare.models.outline import outline

WIDTH, LENGTH = 16, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama as save_pretrained writes it, with a tokenizer beside it."""
    return write_llama(tmp_path_factory.mktemp("llama"), WIDTH)


def config_of(folder, **settings):
    own = {"decoder": "prefix", "decoder_name": str(folder), "tokenizer": "decoder", "max_length": LENGTH}
    targets = {"lora_targets": ["decoder.*.q_proj", "decoder.*.v_proj"]}
    return preset("tiny", **(own | targets | settings))


def batch():
    return noise(2, there=(4, 2))


def some_ids():
    ids = torch.randint(3, 300, (2, 6), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = 0
    return ids


def by_hand(model, memory, mask, ids, prompts):
    """Logits of one report at a time: its own image tokens, begin token, prompts and words, and nothing else."""
    lm, found = model.decoder.lm, []
    for i in range(len(ids)):
        words = lm.get_input_embeddings()(ids[i])
        before = [memory[i][mask[i]], words[:1], *([] if prompts is None else [prompts[i]])]
        logits = lm(inputs_embeds=torch.cat([*before, words[1:]])[None]).logits[0]
        found.append(logits[-len(ids[i]) :])
    return torch.stack(found)


@pytest.mark.parametrize("prompted", [False, True])
def test_logits_are_those_of_one_text_of_image_prompts_and_report(folder, prompted):
    model = build_model(config_of(folder))
    prompts = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)) if prompted else None
    ids = some_ids()
    with torch.no_grad():
        memory, mask = model.memory(batch())
        assert not mask.all(), "one of the images has fewer slices"
        logits, states = model.decode(memory, mask, ids, prompts)
        torch.testing.assert_close(logits, by_hand(model, memory, mask, ids, prompts), rtol=1e-4, atol=1e-5)
    assert states.shape == (2, 6, WIDTH)


@pytest.mark.parametrize("beams", [1, 2])
def test_what_is_written_follows_from_the_logits_and_not_from_the_rest_of_the_batch(folder, beams):
    model = build_model(config_of(folder))
    extend(model, {"labeler": "synthetic", "slices": 4, "seed": 0, "prompt_place": "last"})
    with torch.no_grad():
        model.diagnosis.embeddings.normal_(0, 2, generator=torch.Generator().manual_seed(3))
        written = model.generate(batch(), num_beams=beams)
        alone = [model.generate(rows(batch(), i), beams) for i in range(2)]
    found = [whole(model, row) for row in written]
    assert found == [whole(model, single[0]) for single in alone]
    if beams == 1:
        assert found == greedy(model, batch(), written.shape[1])


def test_half_of_the_memory_in_bfloat16_and_a_loss_in_float32(folder):
    model = build_model(config_of(folder, decoder_dtype="bfloat16"))
    assert {p.dtype for p in model.decoder.parameters()} == {torch.bfloat16}
    whole = build_model(config_of(folder))
    with torch.no_grad():
        half, full = (m(batch(), some_ids(), some_ids()) for m in (model, whole))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0.25, atol=0.3)


def test_its_outline_is_told_without_weights_and_bars_words_and_output(folder):
    config = config_of(folder)
    known = outline(config)
    assert known.parameters == sum(p.numel() for p in build_model(config).parameters())
    assert {"decoder.lm.lm_head", "decoder.lm.model.embed_tokens"} <= known.barred
    assert len(known.targeted(config.lora_targets)) == 4


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"decoder_name": None, "tokenizer": "small"}, "decoder_name"), ({"max_length": 97}, "96 positions"),
     ({"decoder": "gpt2"}, "GPT-2 family"), ({"decoder": "gpt2", "decoder_dtype": "bfloat16"}, "decoder_dtype")],
)  # fmt: skip
def test_settings_that_do_not_fit_are_named(folder, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        build_model(config_of(folder, **settings))


def test_a_tokenizer_with_more_tokens_than_the_model_knows_is_refused(folder, tmp_path):
    small = shutil.copytree(folder, tmp_path / "small")
    text = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(text | {"vocab_size": 1400}))
    with pytest.raises(ConfigError, match=r"1500 tokens: decoder .* knows 1400"):
        build_model(config_of(small))
