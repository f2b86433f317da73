"""The report generator: shapes, masks, losses, the visit before; and its tokenizer."""

import pytest
import torch
from batches import noise, padded, rows
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.imaging.batch import PriorBatch
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.tokenizer import BOS, EOS, PAD, ReportTokenizer

CONFIG = preset("tiny")
TOKENIZER = build_tokenizer(CONFIG)
REPORTS = ["lungs are clear", "nodule of 7 mm in the right upper lobe, new", "effusion"]
BEFORE = ["effusion on the left", "small nodule", "heart enlarged"]


@pytest.fixture(scope="module")
def plain():
    return build_model(CONFIG)


@pytest.fixture(scope="module")
def model():
    model = build_model(CONFIG)
    with torch.no_grad():  # sharper than an untrained decoder, so that reports differ and end
        for parameter in model.decoder.parameters():
            parameter.mul_(6.0)
    return model


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


def test_padded_slices_change_nothing(model):
    batch, longer = noise(3), padded(noise(3), 3)
    torch.testing.assert_close(losses(model, longer), losses(model, batch), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(longer), model.generate(batch))


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


def test_batch_pads_on_the_right_and_masks_labels():
    texts = ["lungs", "lungs are clear, no effusion", ""]
    input_ids, labels = LONG.batch(texts)
    rows = [LONG.encode(text) for text in texts]
    assert input_ids.shape == labels.shape == (3, max(map(len, rows)))
    assert input_ids.dtype == labels.dtype == torch.int64
    for i, row in enumerate(rows):
        assert input_ids[i, : len(row)].tolist() == labels[i, : len(row)].tolist() == row
        assert (input_ids[i, len(row) :] == LONG.pad_id).all() and (labels[i, len(row) :] == -100).all()


def test_training_is_reproducible_and_survives_saving(tmp_path):
    texts = [f"nodule of {n} mm in the right upper lobe" for n in range(50)]
    first, second = (ReportTokenizer.train(texts, 320, 64) for _ in range(2))
    first.save(tmp_path / "tokenizer.json")
    loaded = ReportTokenizer.load(tmp_path / "tokenizer.json", 64)
    assert 256 + 3 < first.vocab_size == second.vocab_size == loaded.vocab_size <= 320
    assert first.encode(texts[7]) == second.encode(texts[7]) == loaded.encode(texts[7])
    assert len(first.encode(texts[7])) < len(texts[7]) / 2


def test_a_file_without_special_tokens_or_no_json_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "bare.json"))
    with pytest.raises(ConfigError, match="lacks the special token <bos>"):
        ReportTokenizer.load(tmp_path / "bare.json", 8)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json is no readable"):
        ReportTokenizer.load(tmp_path / "broken.json", 8)
