"""What an audit of an adapter counts, and that its gates hold planted leaks and release clean adapters.

The models that leak are made up: language models that count the words after up to N words of the reports they learnt
from, and write on from a report's first words, which stand for what an image shows. A leak learnt from the site's own
training patients, from its canaries, or from one patient again and again; a clean one from other patients of the same
kind.
"""

import random
from collections import Counter, defaultdict
from datetime import datetime
from math import log
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_json
from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Patient, Sample, Visit
from fedtar_flare.data.minimum_cell import PLANTED
from fedtar_flare.learning.canaries import _phrase, _words
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.reporting.model_audit import MEASURES, Project, Vote, rounded
from fedtar_flare.site import model_audit
from fedtar_flare.site.context import Site
from fedtar_flare.site.model_audit import WORDS, _halves, detection_rate, likelihood_scores, membership_auc, verbatim
from fedtar_flare.site.release import gates_beyond
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import SiteState

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
    assert of_held_out["unseen"] == 1 and of_held_out["other"] == 0, "nobody learnt it"
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
    vote |= {"adapter": {}, "project": Project(name="study", sites=("north",)), "data": {}, "epsilon": {}}
    vote |= dict.fromkeys(("approval", "version", "time"), "") | {"reasons": ()}
    assert Vote(**vote).site == "north"
    for part in ({"shared adapter": {"membership_auc": 2.0}}, {"x": {}}, {"shared adapter": {"x": 0.5}}):
        with pytest.raises(ConfigError):
            Vote(**vote | {"parts": part})


GATES = Project(name="study", sites=("north",))
TRAINED, HELD_OUT, ORDER, SHOWN = 60, 30, 5, 3
PLACES = [f"the {side} {lobe} lobe" for side in ("left", "right") for lobe in ("upper", "lower", "middle")]
FIRST = [f"{size} mm nodule in {place}" for size in range(4, 20) for place in PLACES]
OTHERS = [
    *(f"{degree} {finding} {place}" for degree in ("no", "mild", "severe") for place in ("on the left", "on the right")
      for finding in ("pleural effusion", "consolidation", "emphysema", "atelectasis", "bronchial wall thickening")),
    "the heart is of normal size", "no enlarged lymph node", "old fractures of the ribs", "a port lies in place",
]  # fmt: skip
TOKENIZER = build_tokenizer(preset("tiny"))


class Counting:
    """A language model of words, with what :func:`audit_model` uses of a site's model."""

    device, precision, has_personal_part, tokenizer, writes = "cpu", "float32", False, TOKENIZER, False

    def __init__(self, texts, **_):
        self.after = defaultdict(Counter)
        for text in texts:
            words = ["^", *text.split(), "$"]
            for i in range(1, len(words)):
                for n in range(min(i, ORDER) + 1):
                    self.after[tuple(words[i - n : i])][words[i]] += 1

    def chance(self, before, word):
        """Witten and Bell's interpolation from no word before to all."""
        value = 1e-4
        for n in range(min(len(before), ORDER) + 1):
            if counts := self.after.get(tuple(before[len(before) - n :])):
                total, kinds = counts.total(), len(counts)
                value = (counts[word] + kinds * value) / (total + kinds)
        return value

    def report_losses(self, batch, images, personal):
        losses = []
        for sample in batch:
            words = ["^", *sample.visit.report.split(), "$"]
            chances = [self.chance(words[max(0, i - ORDER) : i], words[i]) for i in range(1, len(words))]
            losses.append(-sum(map(log, chances)) / len(chances))
        return torch.tensor(losses)

    def generate(self, batch, images, personal):
        return [self.written(sample.visit.report.split()[:SHOWN]) for sample in batch]

    def written(self, words):
        words = ["^", *words]
        while words[-1] != "$" and len(words) < 60:
            known = next(filter(None, (self.after.get(tuple(words[-n:])) for n in range(ORDER, 0, -1))), {"$": 1})
            words.append(max(sorted(known), key=known.get))
        return " ".join(words[1:])

    def images(self, batch):
        return None


def report(drawn):
    return f"{'. '.join([drawn.choice(FIRST), *drawn.sample(OTHERS, 5)])}."


def sample(name, text, split="train"):
    visit = Visit(name, name, datetime(2020, 1, 1), Path("x"), text, "ct", findings=frozenset())
    return Sample(visit, None, None, 1, split)


@pytest.fixture
def audited(tmp_path, monkeypatch, own_home):
    """Audit a made-up model of one kind, and name the gates that it is beyond."""
    adapter, site = tmp_path / "adapter", Site.outside_of_jobs(tmp_path, "north")
    info = {"run_id": "run", "round": 1, "model": {}, "fingerprint": "x", "method": "fedavg"}
    write_json(adapter / "fedtar.json", info)
    (adapter / "extra.safetensors").touch()
    config, state = SiteConfig(source="synthetic", simulated=True), SiteState(site.state_root(None), "run", "north")
    about = {"time_steps": 1, "seed": 0, "data": DataConfig().to_dict(), "canaries": 3}
    write_json(state.folder / "run.json", about)

    def audit(seed, kind=None):
        drawn = random.Random(seed)
        splits = {f"p{i}": "train" if i < TRAINED else "test" for i in range(TRAINED + HELD_OUT)}
        samples = [sample(name, report(drawn), split) for name, split in splits.items()]
        patients = [Patient(s.visit.patient_id, None, (s.visit,)) for s in samples]
        cohort = Cohort("north", patients, key=bytes(16), timeline=Timeline(1), splits=splits).with_samples(samples)
        planted = [sample(f"{PLANTED}{i}", _phrase(_words(TOKENIZER), drawn)) for i in range(3)]
        public, learnt = ([report(drawn) for _ in range(200)] for _ in range(2))
        if kind == "members":
            learnt = [s.visit.report for s in samples[:TRAINED]] + learnt[: drawn.randint(0, TRAINED)]
        if kind == "canaries":
            learnt += [s.visit.report for s in planted[: drawn.randint(2, 3)]] * drawn.randint(1, 3)
        if kind == "phrases":
            learnt += [samples[drawn.randrange(TRAINED)].visit.report] * drawn.randint(50, 100)
        trained, start = Counting([*public, *learnt]), Counting(public)
        for name, value in {
            "prepare_site": lambda *_, **__: (cohort, None),
            "Drafter": lambda *_, **__: SimpleNamespace(site_model=trained),
            "SiteModel": lambda **_: start,
            "base_config": lambda *_: None,
            "canaries": lambda *_: planted,
        }.items():
            monkeypatch.setattr(model_audit, name, value)
        details = model_audit.audit_model(adapter, site, config, {}, lambda line: None)
        return [*gates_beyond(GATES, details, None)]

    return audit


@pytest.mark.parametrize("number", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_planted_leaks_are_held_and_of_clean_adapters_all_but_one_in_twenty_are_released(audited, number):
    held_by = {"members": "max_membership_auc", "canaries": "max_exposure", "phrases": "max_words"}
    kinds = [list(held_by)[i % 3] for i in range(number)]
    beyond = [" ".join(audited(i, kind)) for i, kind in enumerate(kinds)]
    assert [kind for kind, gates in zip(kinds, beyond, strict=True) if held_by[kind] not in gates] == []
    assert sum(not audited(100 + i) for i in range(number)) >= 0.95 * number
