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


@pytest.mark.parametrize("score", [radeval_scores, meteor_scores])
@pytest.mark.parametrize(("references", "hypotheses"), [([], []), (["a"], [])])
def test_reports_that_do_not_go_in_pairs(score, references, hypotheses):
    with pytest.raises(DataError):
        score(references, hypotheses)
