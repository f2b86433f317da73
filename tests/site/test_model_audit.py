"""What an audit of an adapter counts: phrases of one patient alone, and how well scores tell members."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.reporting.model_audit import MEASURES, Project, Vote, rounded
from fedtar_flare.site.model_audit import WORDS, _halves, detection_rate, likelihood_scores, membership_auc, verbatim

COMMON = "no effusion and no sign of pneumothorax in either lung today"
OWN = {name: " ".join(f"{name}{i}" for i in range(13)) for name in "abc"}
NOTHING = dict.fromkeys(("own", "other", "unseen", "longest_own", "longest_other", "longest_unseen"), 0)
REPORTS = [(name, f"{COMMON}. {text}.") for name, text in OWN.items()]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=30), st.data())
def test_the_auc_is_scikit_learn_s(scores, data):
    members = data.draw(st.sets(st.integers(0, len(scores) - 1), min_size=1, max_size=len(scores) - 1))
    found = membership_auc({str(i): float(s) for i, s in enumerate(scores)}, {str(i) for i in members})
    assert found is not None and found[1] >= 0
    assert found[0] == pytest.approx(roc_auc_score([i in members for i in range(len(scores))], scores))
    assert membership_auc({"a": 1.0}, {"a"}) == (None, None)
    fpr, tpr, _ = roc_curve([i in members for i in range(len(scores))], scores, drop_intermediate=False)
    share, (low, high) = detection_rate({str(i): float(s) for i, s in enumerate(scores)}, {str(i) for i in members})
    assert share == pytest.approx(tpr[fpr <= 0.1].max()) and low - 1e-9 <= share <= high + 1e-9


def test_models_that_did_not_see_a_patient_tell_how_hard_the_report_is():
    """Reports differ more from each other than training changes their loss."""
    names, drawn = [str(i) for i in range(200)], np.random.default_rng(0)
    hard = dict(zip(names, drawn.normal(0, 3, 200), strict=True))
    members = set(names[:100])
    seen = [*_halves(names, 6, "seed")]
    assert all(sum(name not in half for half in seen) == 3 and len(half) == 100 for name in names for half in seen)
    outside = [{name: hard[name] + drawn.normal(0, 0.3) for name in names if name not in half} for half in seen]
    losses = {name: hard[name] + drawn.normal(0, 0.3) - (name in members) for name in names}
    alone = membership_auc({name: -loss for name, loss in losses.items()}, members)[0]
    assert alone < 0.7 < 0.95 < membership_auc(likelihood_scores(losses, outside), members)[0]


def test_phrases_of_one_patient_alone_are_found_and_what_all_say_is_not():
    def found_in(*drafts):
        return verbatim(drafts, REPORTS, {"a", "b"})

    of_nobody = found_in(("c", COMMON), ("a", "nothing of the kind was ever written in a report here before"))
    assert of_nobody == NOTHING
    words = len(OWN["a"].split())
    assert found_in(("c", OWN["a"])) == NOTHING | {"other": 1, "longest_other": words}
    assert found_in(("a", OWN["a"])) == NOTHING | {"own": 1, "longest_own": words}
    of_held_out = found_in(("a", OWN["c"]))
    assert of_held_out["unseen"] == 1 and of_held_out["other"] == 0, (
        "a held-out patient's phrase was never learned from"
    )
    whole = found_in(("c", REPORTS[0][1]))
    assert 0 < whole["other"] < 1 and whole["longest_other"] >= words > WORDS


@given(st.integers(0, 12), st.floats(0, 1))
def test_a_summary_is_rounded_and_silent_about_few_patients(patients, share):
    counts = {"training": {"all": patients, "rare": patients // 2}, "held_out": {"all": 9, "rare": 9}}
    drafts = {"own": share, "other": share, "longest_own": 9, "longest_other": 9}
    part = dict.fromkeys(("membership_auc", "loss_auc", "rare_auc"), share)
    part |= {"standard_error": 0.1, "training": drafts, "held_out": drafts}
    told = rounded({"shared adapter": part}, counts, 5)["shared adapter"]
    assert bool(told) == (patients >= 5) and set(told) <= set(MEASURES)
    assert all(value is None or np.isclose(value * 20, round(value * 20)) for value in told.values())
    assert ("rare_auc" in told) == (patients // 2 >= 5)


def test_a_vote_that_no_site_writes_is_refused():
    vote = {"site": "north", "run_id": "r", "round": 1, "held": False, "parts": {"shared adapter": {}}, "yes": True}
    vote |= {
        "adapter": {},
        "project": Project(name="study", sites=("north",)),
        "reasons": (),
        "data": {},
        "epsilon": {},
    }
    vote |= dict.fromkeys(("approval", "version", "time"), "")
    assert Vote(**vote).site == "north"
    for part in ({"shared adapter": {"membership_auc": 2.0}}, {"x": {}}, {"shared adapter": {"x": 0.5}}):
        with pytest.raises(ConfigError):
            Vote(**vote | {"parts": part})
