"""Byte-level BPE: round trip of any text, special tokens, cutting, batches."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.models.tokenizer import BOS, EOS, PAD, ReportTokenizer

TOKENIZER = build_tokenizer(preset("tiny", max_length=100_000, decoder_config={"n_positions": 100_000}))


@settings(max_examples=250, deadline=None)
@given(st.text(st.characters()))
@example("")
@example("  two  spaces\tand\r\nlines\n")
@example(f"{BOS}{EOS}{PAD} spelled out <|endoftext|>")
@example("肺结节 4 mm，右上叶 · żółć 👩🏽‍⚕️ \u200b\ufeff\x00\u0301e\u0301 \U0010ffff \ud800")
@example(" leading and trailing ")
def test_any_text_comes_back_as_it_was_but_for_lone_surrogates(text: str):
    ids = TOKENIZER.encode(text)
    assert ids[0] == TOKENIZER.bos_id and ids[-1] == TOKENIZER.eos_id
    assert not {TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id} & set(ids[1:-1])
    assert max(ids) < TOKENIZER.vocab_size
    assert TOKENIZER.decode(ids) == text.encode("utf-8", "replace").decode()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_any_ids_decode_up_to_the_first_end_without_padding(ids: list[int]):
    assert isinstance(TOKENIZER.decode(ids), str)
    assert TOKENIZER.decode([*TOKENIZER.encode("lungs clear"), TOKENIZER.pad_id, *ids]) == "lungs clear"


def test_a_long_report_is_cut_and_has_no_end():
    short = build_tokenizer(preset("tiny", max_length=8))
    ids = short.encode("zq " * 50)
    assert len(ids) == 8 and ids[0] == short.bos_id and short.eos_id not in ids


def test_batch_pads_on_the_right_and_masks_labels():
    texts = ["lungs", "lungs are clear, no effusion", ""]
    input_ids, labels = TOKENIZER.batch(texts)
    rows = [TOKENIZER.encode(text) for text in texts]
    assert input_ids.shape == labels.shape == (3, max(map(len, rows)))
    assert input_ids.dtype == labels.dtype == torch.int64
    for i, row in enumerate(rows):
        assert input_ids[i, : len(row)].tolist() == labels[i, : len(row)].tolist() == row
        assert (input_ids[i, len(row) :] == TOKENIZER.pad_id).all() and (labels[i, len(row) :] == -100).all()


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
