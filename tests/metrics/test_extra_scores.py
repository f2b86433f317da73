"""Optional scorers: what is said where they are missing, and what is handed to them where they are not."""

import re
import sys
from types import ModuleType

import pytest

from fedtar_flare.errors import ConfigError, DataError
from fedtar_flare.metrics.extra_scores import meteor_scores, radeval_scores


def absent(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_missing_package_names_its_extra(monkeypatch, repository):
    absent(monkeypatch, "radeval", "nltk", "nltk.translate.meteor_score")
    for call in (radeval_scores, meteor_scores):
        with pytest.raises(ConfigError, match=r"not installed: pip install 'fedtar_flare\[scores\]'"):
            call(["a"], ["b"])
    extras = (repository / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    assert re.search(r"^scores = \[.*RadEval.*nltk", extras, flags=re.M)


class FakeRadEval:
    def __init__(self, metrics, show_progress, cache_dir):
        self.metrics, self.cache_dir = metrics, cache_dir

    def __call__(self, refs, hyps):
        if self.cache_dir == "empty":
            raise OSError("no model")
        assert (refs, hyps, self.metrics) == (["a"], ["b"], ["radgraph"])
        return {"radgraph_simple": 0.5, "radgraph_partial": 1, "labels": {"x": 0.5}}


def test_radeval_gets_the_reports_and_gives_its_numbers(monkeypatch):
    module = ModuleType("radeval")
    module.RadEval = FakeRadEval
    monkeypatch.setitem(sys.modules, "radeval", module)
    assert radeval_scores(("a",), ("b",)) == {"radgraph_simple": 0.5, "radgraph_partial": 1.0}
    with pytest.raises(ConfigError, match=r"could not compute radgraph .*no model.*must lie in its cache"):
        radeval_scores(["a"], ["b"], cache_dir="empty")


@pytest.mark.parametrize("metrics", [["crimson"], ["radfact_ct"], []])
def test_metrics_that_send_reports_elsewhere_are_refused(metrics):
    with pytest.raises(ConfigError, match="choose from radgraph"):
        radeval_scores(["a"], ["b"], metrics)


def test_meteor_scores_cleaned_tokens(monkeypatch):
    module = ModuleType("nltk.translate.meteor_score")
    module.meteor_score = lambda references, hypothesis: (
        float(references == [["no", "effusion", "."]]) * len(hypothesis)
    )
    for name in ("nltk", "nltk.translate"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "nltk.translate.meteor_score", module)
    assert meteor_scores(["No effusion."], ["Effusion!"]) == [1.0]

    def lost(references, hypothesis):
        raise LookupError("wordnet")

    module.meteor_score = lost
    with pytest.raises(ConfigError, match="wordnet"):
        meteor_scores(["a"], ["b"])


def meteor(precision, recall, chunks, matches):
    """Lavie and Agarwal 2007, with alpha 0.9, beta 3, gamma 0.5."""
    mean = precision * recall / (0.9 * precision + 0.1 * recall)
    return mean * (1 - 0.5 * (chunks / matches) ** 3)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "expected"),
    [
        ("the heart is normal.", "Heart is normal", meteor(1, 3 / 5, 1, 3)),
        ("small effusions, increasing", "small effusion, increased", meteor(1, 1, 1, 3)),  # two of them by their stems
        ("no effusion", "effusion no", meteor(1, 1, 2, 2)),
        ("no effusion today", "today no change", meteor(2 / 3, 2 / 3, 2, 2)),
        ("normal heart", "cardiac silhouette", 0.0),  # synonyms are not known
        ("normal heart", "", 0.0),
    ],
)
def test_meteor_without_synonyms_needs_no_data(reference, hypothesis, expected):
    pytest.importorskip("nltk", reason="nltk is not installed (the extra 'scores')")
    assert meteor_scores([reference], [hypothesis], synonyms=False) == [pytest.approx(expected, abs=1e-12)]


def test_meteor_with_synonyms_says_that_its_data_is_missing(monkeypatch, tmp_path):
    data = pytest.importorskip("nltk.data", reason="nltk is not installed (the extra 'scores')")
    monkeypatch.setattr(data, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"wordnet.*leave synonyms out"):
        meteor_scores(["a heart"], ["a heart that beats"])


@pytest.mark.parametrize("score", [radeval_scores, meteor_scores])
@pytest.mark.parametrize(("references", "hypotheses"), [([], []), (["a"], [])])
def test_reports_that_do_not_go_in_pairs(score, references, hypotheses):
    with pytest.raises(DataError):
        score(references, hypotheses)
