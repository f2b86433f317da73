"""CheXbert and RadBERT, read from local folders with tiny random models of the published layout."""

import re

import pytest
import torch

from fedtar_flare.errors import ConfigError
from fedtar_flare.metrics.chexpert_rules import chexpert_labeler
from fedtar_flare.metrics.neural_labelers import CHEXBERT_CLASSES, CHEXBERT_LABELS, RADBERT_CLASSES, CheXbert, RadBERT

transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "no", "effusion", "small", "heart", "."]
TEXTS = ["No effusion.", "Small\n  effusion. " * 400, "", "heart", "small heart small heart"]
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def tokenizer_in(folder):
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


@pytest.fixture
def chexbert(tmp_path):
    """As published: DataParallel's names, under model_state_dict, with the position ids of older versions."""
    tokenizer_in(tmp_path)
    config = transformers.BertConfig(vocab_size=len(WORDS), **SIZES)
    config.save_pretrained(tmp_path)
    bert = transformers.BertModel(config)
    state = {f"module.bert.{name}": value for name, value in bert.state_dict().items()}
    state["module.bert.embeddings.position_ids"] = torch.arange(512)[None]
    heads = []
    for i in range(14):
        head = torch.nn.Linear(8, 2 if i == 13 else 4)
        heads.append(head)
        state |= {f"module.linear_heads.{i}.{name}": value for name, value in head.state_dict().items()}
    torch.save({"epoch": 3, "model_state_dict": state}, tmp_path / "chexbert.pth")
    return tmp_path, bert.eval(), heads


def test_chexbert_gives_the_labels_of_the_published_layout(chexbert):
    folder, bert, heads = chexbert
    labeler = CheXbert(folder, batch_size=2)
    got = labeler(TEXTS)
    for text, labels in zip(TEXTS, got, strict=True):
        words = re.findall(r"\w+|\.", text.lower())[:510]
        ids = [2, *(WORDS.index(word) for word in words), 3]
        with torch.no_grad():
            hidden = bert(input_ids=torch.tensor([ids])).last_hidden_state[0, 0]
            expected = [CHEXBERT_LABELS[head(hidden).argmax()] for head in heads]
        assert labels == dict(zip(CHEXBERT_CLASSES, expected, strict=True))
    assert labeler([]) == []


def test_both_labelers_of_chexpert_know_the_same_classes():
    assert set(CHEXBERT_CLASSES) == set(chexpert_labeler().names)


def roberta():
    config = transformers.RobertaConfig(vocab_size=len(WORDS), max_position_embeddings=514, pad_token_id=0, **SIZES)
    return config, transformers.RobertaModel(config).eval()


def test_radbert_from_the_classifier_of_ct_rate(tmp_path):
    tokenizer_in(tmp_path)
    config, encoder = roberta()
    config.save_pretrained(tmp_path)
    head = torch.nn.Linear(8, 18)
    state = {f"model.{name}": value for name, value in encoder.state_dict().items()}
    torch.save(state | {f"classifier.{n}": v for n, v in head.state_dict().items()}, tmp_path / "RadBertClassifier.pth")
    got = RadBERT(tmp_path)(["small heart"])
    with torch.no_grad():
        on = head(encoder(input_ids=torch.tensor([[2, 7, 8, 3]])).pooler_output)[0] >= 0
    assert got == [{n: "positive" if o else "blank" for n, o in zip(RADBERT_CLASSES, on.tolist(), strict=True)}]
    torch.save(state, tmp_path / "another.pth")
    with pytest.raises(ConfigError, match=r"2 \.pth files"):
        RadBERT(tmp_path)


@pytest.mark.parametrize("outputs", [18, 5])
def test_radbert_from_a_sequence_classifier(tmp_path, outputs):
    tokenizer_in(tmp_path)
    config, _ = roberta()
    config.num_labels = outputs
    model = transformers.RobertaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    if outputs != 18:
        with pytest.raises(ConfigError, match="5 outputs"):
            RadBERT(tmp_path)
        return
    with torch.no_grad():
        on = model(input_ids=torch.tensor([[2, 7, 8, 3]])).logits[0].sigmoid() >= 0.5
    assert [label == "positive" for label in RadBERT(tmp_path)(["small heart"])[0].values()] == on.tolist()


@pytest.mark.parametrize("labeler", [CheXbert, RadBERT])
def test_without_a_local_checkpoint_the_way_out_is_named(tmp_path, labeler):
    with pytest.raises(ConfigError, match=r"config\.json.*never downloaded.*rule-based"):
        labeler(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(chexbert):
    folder, _, _ = chexbert
    torch.save({"weights": torch.zeros(2)}, folder / "chexbert.pth")
    with pytest.raises(ConfigError, match=r"chexbert\.pth does not fit"):
        CheXbert(folder)
    (folder / "chexbert.pth").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match=r"chexbert\.pth does not fit"):
        CheXbert(folder)


def test_a_folder_without_tokenizer_is_refused(chexbert):
    folder, _, _ = chexbert
    for file in folder.glob("*token*"):
        file.unlink()
    (folder / "vocab.txt").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        CheXbert(folder)


def test_a_tokenizer_of_another_model_is_refused(chexbert):
    folder, _, _ = chexbert
    transformers.BertConfig(vocab_size=len(WORDS) - 1, **SIZES).save_pretrained(folder)
    with pytest.raises(ConfigError, match="do not belong together"):
        CheXbert(folder)
