"""BERTScore from tiny random checkpoints, against its definition written out, and against the authors' library."""

import math

import pytest
import torch

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.metrics.bert_score import bert_scores

transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "no", "effusion", "small", "heart", "new", "normal", "."]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
LAYERS = 3
REFERENCES = ["No effusion.", "Small heart.", "normal heart. no effusion. small effusion.", "no", "", "heart"]
HYPOTHESES = ["no new effusion.", "small heart.", "normal heart.", "new heart", "heart", " "]


def checkpoint(folder, layers=LAYERS, seed=0):
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.BertConfig(num_hidden_layers=layers, initializer_range=0.5, **SIZES)
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    return model


def states(model, text, layer):
    """Of the text's tokens, the two special ones around them included."""
    words = text.lower().replace(".", " .").split()
    ids = torch.tensor([[2, *map(WORDS.index, words), 3]])
    with torch.no_grad():
        return model(ids, output_hidden_states=True).hidden_states[layer][0].tolist()


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def by_definition(model, reference, hypothesis, layer):
    if not reference.strip() or not hypothesis.strip():
        return 0.0
    r, h = states(model, reference, layer), states(model, hypothesis, layer)
    recalls = [max(cosine(one, other) for other in h) for one in r[1:-1]]
    precisions = [max(cosine(one, other) for other in r) for one in h[1:-1]]
    recall, precision = sum(recalls) / len(recalls), sum(precisions) / len(precisions)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("layer", [1, LAYERS])
def test_the_scores_are_those_of_the_definition(tmp_path, layer):
    model = checkpoint(tmp_path)
    pairs = zip(REFERENCES, HYPOTHESES, strict=True)
    expected = [by_definition(model, reference, hypothesis, layer) for reference, hypothesis in pairs]
    assert len({round(value, 3) for value in expected}) > 3
    for batch_size in (1, 4):
        found = bert_scores(REFERENCES, HYPOTHESES, tmp_path, layer, batch_size=batch_size)
        assert found == pytest.approx(expected, abs=1e-5)
    assert found[1] == pytest.approx(1.0, abs=1e-5)  # the same words


def test_the_scores_are_those_of_the_authors_library(tmp_path):
    library = pytest.importorskip("bert_score", reason="bert-score is not installed")
    checkpoint(tmp_path)
    scorer = library.BERTScorer(model_type=str(tmp_path), num_layers=2, device="cpu", batch_size=1)
    pairs = [pair for pair in zip(REFERENCES, HYPOTHESES, strict=True) if all(text.strip() for text in pair)]
    for reference, hypothesis in pairs:  # one at a time: its padding has a similarity of 0, which may be the largest
        expected = scorer.score([hypothesis], [reference])[2].tolist()
        assert bert_scores([reference], [hypothesis], tmp_path, 2) == pytest.approx(expected, abs=1e-5)


def test_long_reports_are_cut(tmp_path):
    checkpoint(tmp_path)
    long = "no effusion. " * 400
    assert bert_scores([long], [long + "new heart"], tmp_path, 1) == [pytest.approx(1.0, abs=1e-5)]


@pytest.mark.parametrize("layer", [0, LAYERS + 1])
def test_a_layer_that_is_not_there(tmp_path, layer):
    checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=f"layer {layer}: .* has 1 to {LAYERS}"):
        bert_scores(["a"], ["b"], tmp_path, layer)


def test_folders_without_a_whole_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json.*never downloaded.*leave this score out"):
        bert_scores(["a"], ["b"], "roberta-large", 17)
    checkpoint(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    with pytest.raises(ConfigError, match="holds no model that can be read"):
        bert_scores(["a"], ["b"], tmp_path, 1)
    less = tmp_path / "less"
    less.mkdir()
    checkpoint(less, layers=1)
    weights.write_bytes((less / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"of another model: they lack encoder\.layer\.1"):
        bert_scores(["a"], ["b"], tmp_path, 1)
    weights.write_bytes(whole)
    assert len(bert_scores(["no"], ["no"], tmp_path, 1)) == 1


@pytest.mark.parametrize(("references", "hypotheses"), [([], []), (["a"], [])])
def test_reports_that_do_not_go_in_pairs(tmp_path, references, hypotheses):
    with pytest.raises(DataError):
        bert_scores(references, hypotheses, tmp_path, 1)
