"""The report generator: its decoders, R2Gen's memory by hand, masks, losses, the visit before; and its tokenizer."""

import shutil

import numpy as np
import pytest
import torch
from batches import greedy, noise, rows, whole
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import write_llama
from tokenizers import Tokenizer, models

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.imaging.batch import ImageBatch, PriorBatch
from fedtar_flare.learning.diagnosis import extend
from fedtar_flare.methods.fedmrg.config import PROMPTS
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.outline import outline
from fedtar_flare.models.r2gen import SLOTS, RelationalMemory
from fedtar_flare.models.tokenizer import BOS, EOS, PAD, ReportTokenizer
from fedtar_flare.presets import papers

CONFIG = preset("tiny")
TOKENIZER = build_tokenizer(CONFIG)
REPORTS = ["lungs are clear", "nodule of 7 mm in the right upper lobe, new", "effusion"]
BEFORE = ["effusion on the left", "small nodule", "heart enlarged"]


@pytest.fixture(scope="module")
def plain():
    return build_model(CONFIG)


def sharpened(model, factor):
    """With a decoder sharper than an untrained one, so that reports differ and end."""
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(factor)
    return model


@pytest.fixture(scope="module")
def model():
    return sharpened(build_model(CONFIG), 6.0)


def losses(model, batch):
    with torch.no_grad():
        return model(batch, *TOKENIZER.batch(REPORTS))


def test_loss_of_each_report_is_the_mean_over_its_tokens(model):
    loss = losses(model, noise(3))
    assert loss.shape == (3,) and loss.dtype == torch.float32
    for i, report in enumerate(REPORTS):
        ids = torch.tensor([TOKENIZER.encode(report)])
        memory, _ = model.encode(rows(noise(3), i))
        logits = model.decoder(input_ids=ids, encoder_hidden_states=memory).logits[0]
        chosen = logits.log_softmax(-1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        torch.testing.assert_close(loss[i], -chosen.mean(), rtol=1e-4, atol=1e-5)


def test_the_encoder_stays_in_eval_mode_and_its_statistics_stay_put(model):
    before = {k: v.clone() for k, v in model.encoder.state_dict().items()}
    model.train()
    model.encoder.train()
    assert model.decoder.training and not any(module.training for module in model.encoder.modules())
    assert torch.equal(losses(model, noise(3)), losses(model, noise(3)))
    assert all(torch.equal(v, before[k]) for k, v in model.encoder.state_dict().items())
    model.eval()


def followed(texts=BEFORE, days=(30.0, 7.0, 200.0)):
    """Three visits, each with one before."""
    batch, (ids, labels) = noise(3), TOKENIZER.batch(texts)
    batch.prior = PriorBatch(torch.tensor(days), noise(3, seed=1), ids, labels != -100)
    return batch


def test_image_report_and_time_reach_the_loss_of_their_own_row_alone(plain):
    base = losses(plain, followed())
    assert not torch.isclose(base, losses(plain, noise(3))).any()
    report = followed([BEFORE[0], "cavity on the right", BEFORE[2]])
    days, image = followed(days=(30.0, 70.0, 200.0)), followed()
    image.prior.images.images[1] = 255 - image.prior.images.images[1]
    for name, batch in {"report": report, "days": days, "image": image}.items():
        close = torch.isclose(losses(plain, batch), base, rtol=1e-6, atol=1e-7)
        assert close.tolist() == [True, False, True], name


def test_no_gradient_flows_through_the_visit_before(plain):
    batch, present = followed(), CONFIG.slices * CONFIG.queries
    memory, mask = plain.memory(batch, plain.encoded(batch))
    assert memory.shape[:2] == mask.shape == (3, 2 * present + batch.prior.input_ids.shape[1])
    (gradient,) = torch.autograd.grad(memory[:, present:].sum(), plain.projection.weight, allow_unused=True)
    assert gradient is None or not gradient.any()


LONG = build_tokenizer(preset("tiny", max_length=100_000, decoder_config={"n_positions": 100_000}))


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters()))
@example("")
@example("  two  spaces\tand\r\nlines\n")
@example(f"{BOS}{EOS}{PAD} spelled out <|endoftext|>")
@example("肺结节 4 mm，右上叶 · żółć 👩🏽‍⚕️ \u200b\ufeff\x00\u0301e\u0301 \U0010ffff \ud800")
@example(" leading and trailing ")
def test_any_text_comes_back_as_it_was_but_for_lone_surrogates(text: str):
    ids = LONG.encode(text)
    assert ids[0] == LONG.bos_id and ids[-1] == LONG.eos_id
    assert not {LONG.bos_id, LONG.eos_id, LONG.pad_id} & set(ids[1:-1])
    assert max(ids) < LONG.vocab_size
    assert LONG.decode(ids) == text.encode("utf-8", "replace").decode()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, LONG.vocab_size - 1), max_size=30))
def test_any_ids_decode_up_to_the_first_end_without_padding(ids: list[int]):
    assert isinstance(LONG.decode(ids), str)
    assert LONG.decode([*LONG.encode("lungs clear"), LONG.pad_id, *ids]) == "lungs clear"


def test_a_long_report_is_cut_and_has_no_end():
    short = build_tokenizer(preset("tiny", max_length=8))
    ids = short.encode("zq " * 50)
    assert len(ids) == 8 and ids[0] == short.bos_id and short.eos_id not in ids


def test_a_file_without_special_tokens_or_no_json_is_refused(tmp_path):
    Tokenizer(models.BPE()).save(str(tmp_path / "bare.json"))
    with pytest.raises(ConfigError, match="lacks the special token <bos>"):
        ReportTokenizer.load(tmp_path / "bare.json", 8)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json is no readable"):
        ReportTokenizer.load(tmp_path / "broken.json", 8)


KINDS = ("gpt2", "transformer", "r2gen", "prefix")


@pytest.fixture(scope="module")
def model_of(folder):
    """Models by their decoder; the image before words, with prompts behind it."""

    def make(kind):
        named = {"decoder_name": str(folder)} if kind == "prefix" else {}
        model = sharpened(build_model(preset("tiny", decoder=kind, max_length=20, **named)), 3.0)
        if kind == "prefix":
            extend(model, {"labeler": "synthetic", "slices": 4, "seed": 0, **PROMPTS["paper"]})
            torch.nn.init.normal_(model.diagnosis.embeddings, 0, 2, torch.Generator().manual_seed(3))
        return model

    return make


def by_the_equations(memory, words, width, heads):
    """M after each word (L, E), from the paper's equations in float64."""
    w = {name: value.detach().double().numpy() for name, value in memory.named_parameters()}
    size, state, states = width // heads, np.eye(SLOTS, width), []
    for word in words:
        both = np.vstack([state, word])
        maps = zip(np.split(w["attention.in_proj_weight"], 3), np.split(w["attention.in_proj_bias"], 3), strict=True)
        q, k, v = (x @ m.T + b for x, (m, b) in zip((state, both, both), maps, strict=True))
        attended = []
        for h in range(heads):
            at = slice(h * size, (h + 1) * size)
            scores = np.exp(q[:, at] @ k[:, at].T / np.sqrt(size))
            attended.append(scores / scores.sum(1, keepdims=True) @ v[:, at])
        z = np.hstack(attended) @ w["attention.out_proj.weight"].T + w["attention.out_proj.bias"]
        inner = np.maximum((z + state) @ w["mlp.0.weight"].T + w["mlp.0.bias"], 0)
        new = np.maximum(inner @ w["mlp.2.weight"].T + w["mlp.2.bias"], 0) + z + state
        gates = word @ w["of_word.weight"].T + w["of_word.bias"]
        gates = gates + np.tanh(state) @ w["of_memory.weight"].T + w["of_memory.bias"]
        take, keep = np.split(1 / (1 + np.exp(-gates)), 2, axis=1)
        state = keep * state + take * np.tanh(new)
        states.append(state.ravel())
    return np.array(states)


def test_the_memory_is_that_of_the_papers_equations():
    torch.manual_seed(0)
    memory, words = RelationalMemory(8, 2, layer=3), 3 * torch.randn(2, 5, 8)
    assert torch.equal(memory(words), words)
    for row in range(2):
        expected = by_the_equations(memory, words[row].double().numpy(), 8, 2)
        np.testing.assert_allclose(memory.states[row].detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_with_a_cache_is_what_the_logits_say_and_beams_do_not_depend_on_the_batch(model_of, kind):
    model, batch = model_of(kind), noise(3, there=(4, 2, 3))
    written = model.generate(batch, num_beams=1, max_length=12)
    assert [whole(model, row) for row in written] == greedy(model, batch, 12)
    together = model.generate(batch, num_beams=3, max_length=12)
    assert len({tuple(row.tolist()) for row in together}) > 1
    for i in range(3):
        single = model.generate(rows(batch, i), num_beams=3, max_length=12)[0]
        assert whole(model, together[i]) == whole(model, single)


@pytest.mark.parametrize("kind", KINDS)
def test_no_word_sees_those_after_it(model_of, kind):
    model, ids = model_of(kind), torch.randint(3, 90, (2, 12))
    other = ids.clone()
    other[:, 7:] = 5
    with torch.no_grad():
        memory, mask = model.memory(noise(2), model.encoded(noise(2)))
        logits, others = (model.decode(memory, mask, x)[0] for x in (ids, other))
    torch.testing.assert_close(logits[:, :7], others[:, :7])
    assert not torch.allclose(logits[:, 7:], others[:, 7:])


@pytest.mark.parametrize("kind", KINDS[:3])
def test_shapes_padding_and_gradients_of_every_part(kind):
    model = build_model(preset("tiny", decoder=kind))  # sites train in evaluation mode
    ids, labels = TOKENIZER.batch(REPORTS[:2])
    memory, mask = model.memory(batch(), model.encoded(batch()))
    assert memory.shape == (2, 8, 32) and model.decode(memory, mask, ids)[0].shape[:2] == ids.shape
    fewer = ImageBatch(batch().images[1:, :2], batch().position_mm[1:, :2], batch().slice_mask[1:, :2])
    torch.testing.assert_close(model.encode(fewer)[0][0], memory[1, :4])  # padded slices change nothing
    prior = PriorBatch(torch.tensor([30.0, 0.0]), noise(2, there=(4, 0)))  # the second has no visit before
    model(ImageBatch(*[*vars(batch()).values()][:3], prior), ids, labels).mean().backward()
    names = {n: p for n, p in model.named_parameters() if not n.startswith("encoder.")}
    assert not [name for name, p in names.items() if p.grad is None or not 0 < p.grad.norm() < torch.inf]
    own = [any(part in name for name in names) for part in ("image_layers.", "drop.attention")]
    assert own == [kind != "gpt2", kind == "r2gen"]
    assert set(model.untrained) >= {n for n in names if n.startswith(("image_layers.", "decoder."))}


def test_the_preset_trains_all_but_what_takes_pixels_and_words():
    known = outline(preset("r2gen"))
    held = set(known.tensors) - set(known.exchanged(papers()["r2gen"].settings["lora.exchange"]))
    words = {f"decoder.{name}.weight" for name in ("transformer.wte", "transformer.wpe", "lm_head")}
    assert held == words | {"encoder.backbone.conv1.weight"} == held & known.barred


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


def test_a_draft_ends_at_each_of_several_ends(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7, 9]}')
    tokenizer = build_tokenizer(config_of(tmp_path))
    assert tokenizer.eos_id == 5
    assert {tokenizer.decode([0, 300, end, 301]) for end in (5, 7, 9)} == {tokenizer.decode([0, 300])}
    assert build_model(config_of(tmp_path))._settings(1, 1, 9).eos_token_id == [5, 7, 9]
