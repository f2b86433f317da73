"""CheXbert and RadBERT, read from tiny checkpoints of the published form."""

import json
import re

import numpy as np
import pytest
import torch
from command import failing, passing
from labelers import WORDS, published
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.report_labeler import ReportLabeler, import_labeler
from fedtar_flare.metrics.labeler import classes_of

TEXTS = ["No effusion.", "Small\n  effusion. " * 400, "", "heart", "small heart small heart"]


@pytest.mark.parametrize("kind", ["chexbert", "radbert"])
def test_labels_are_those_of_the_published_model(tmp_path, kind):
    file, encoder, heads = published(tmp_path / "hub", kind)
    assert kind in passing("labeler", "import", file, "-o", tmp_path / "labeler")
    assert not [one for one in (tmp_path / "labeler").iterdir() if one.suffix in (".pth", ".bin", ".pkl")]
    before = torch.random.get_rng_state()
    name, code_of = ReportLabeler(tmp_path / "labeler").label(TEXTS, TEXTS[:2])
    assert name == kind and torch.equal(before, torch.random.get_rng_state()), "training draws what it drew"
    seen = set()
    for text in TEXTS:
        words = re.findall(r"\w+|\.", text.lower())[:510]
        ids = torch.tensor([[2, *(WORDS.index(word) for word in words), 3]])
        with torch.no_grad():
            hidden = encoder(input_ids=ids)
            if kind == "chexbert":
                expected = "".join("bpnu"[head(hidden.last_hidden_state[0, 0]).argmax()] for head in heads)
            else:
                expected = "".join("bp"[int(one.sigmoid() >= 0.5)] for one in heads[0](hidden.pooler_output)[0])
        assert code_of(text) == expected and len(expected) == len(classes_of(kind))
        seen.add(expected)
    assert len(seen) > 2 and [*classes_of(kind)] == cases(__file__, "published_classes.yaml")[kind]


def test_references_are_read_once(tmp_path):
    file, *_ = published(tmp_path / "hub", "chexbert")
    import_labeler(file, tmp_path / "labeler")
    labeler = ReportLabeler(tmp_path / "labeler", cache=tmp_path / "cache")
    first = [*map(labeler.label(TEXTS, ["small"]).code, TEXTS)]
    (held,) = (tmp_path / "cache").iterdir()
    assert held.stat().st_mode & 0o777 == 0o600 and "effusion" not in held.read_text()
    (tmp_path / "labeler" / "model.safetensors").unlink()
    assert [*map(labeler.label(TEXTS, TEXTS[:1]).code, TEXTS)] == first
    with pytest.raises(ConfigError, match="cannot be read"):
        labeler.label(TEXTS, ["small"])


class Code:
    """What a pickle would run."""


def changed(file, change):
    state = torch.load(file)
    change(state["model_state_dict"])
    torch.save(state, file)


def configure(file, **settings):
    (file.parent / "config.json").write_text(json.dumps({"model_type": "bert", **settings}))


BIAS = "module.linear_heads.3.bias"
REFUSED = {
    "code": (lambda file: torch.save({"a": Code()}, file), r"needs \S*Code to be run"),
    "pointer": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:4000]), "cut short"),
    "no state dict": (lambda file: torch.save([torch.ones(1)], file), "state dict"),
    "not tensors": (lambda file: torch.save({"linear_heads.0.weight": 3}, file), "does not fit|state dict"),
    "another width": (lambda file: changed(file, lambda s: s.update({BIAS: torch.ones(5)})), r"linear_heads\.3\.bias"),
    "not finite": (lambda file: changed(file, lambda s: s[BIAS].fill_(np.nan)), "not finite"),
    "no tokenizer": (lambda file: [one.unlink() for one in file.parent.glob("[tv]*")], "no tokenizer.json"),
    "another tokenizer": (lambda file: configure(file, vocab_size=3), "10 tokens of the tokenizer"),
    "too deep": (lambda file: configure(file, num_hidden_layers=200000000), "200000000 layers"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_published_checkpoint_is_refused_by_name(tmp_path, fault):
    file, *_ = published(tmp_path / "hub", "chexbert")
    spoil, stated = REFUSED[fault]
    spoil(file)
    assert re.search(stated, failing("labeler", "import", file, "-o", tmp_path / "labeler"))
    assert not (tmp_path / "labeler" / "labeler.json").exists()
