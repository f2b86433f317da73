"""Planted leaks are held and clean adapters are released, by the default gates and the real audit.

The models are made up: language models that count the words after up to N words of the reports they learnt from, and
write on from a report's first words, which stand for what an image shows. A leak learnt from the site's own training
patients, from its canaries, or from one patient again and again; a clean one from other patients of the same kind.
"""

import random
from collections import Counter, defaultdict
from datetime import datetime
from math import log
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedtar_flare.core.files import write_json
from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Patient, Sample, Visit
from fedtar_flare.data.minimum_cell import PLANTED
from fedtar_flare.learning.canaries import _phrase, _words
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.models.config import preset
from fedtar_flare.reporting.model_audit import Project
from fedtar_flare.site import model_audit
from fedtar_flare.site.context import Site
from fedtar_flare.site.release import gates_beyond
from fedtar_flare.site.site_file import SiteConfig
from fedtar_flare.site.state import SiteState

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
def audited(tmp_path, monkeypatch):
    """Audit a made-up model of one kind, and name the gates that it is beyond."""
    adapter, site = tmp_path / "adapter", Site.outside_of_jobs(tmp_path, "north")
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
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


def test_twenty_planted_leaks_are_held(audited):
    held_by = {"members": "max_membership_auc", "canaries": "max_exposure", "phrases": "max_words"}
    kinds = [list(held_by)[i % 3] for i in range(20)]
    beyond = [" ".join(audited(i, kind)) for i, kind in enumerate(kinds)]
    assert [kind for kind, gates in zip(kinds, beyond, strict=True) if held_by[kind] not in gates] == []


def test_nineteen_of_twenty_clean_adapters_are_released(audited):
    assert sum(not audited(100 + i) for i in range(20)) >= 19
