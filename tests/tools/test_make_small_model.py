"""The command that makes the shipped model again, and the model that is shipped."""

from datetime import datetime
from itertools import chain, product

import numpy as np
import pytest
import torch

from fedtar_flare.data.cohort import Visit
from fedtar_flare.imaging.pipeline import Size, prepare
from fedtar_flare.learning import diagnosis
from fedtar_flare.learning.pretraining import write_reports
from fedtar_flare.methods.fedmrg.config import PROMPTS
from fedtar_flare.metrics.agreement import finding_f1
from fedtar_flare.metrics.language import language_scores
from fedtar_flare.models.build import build_model, build_tokenizer
from fedtar_flare.models.config import ASSETS, preset
from fedtar_flare.synthetic.dicom_writer import write_ct_series
from fedtar_flare.synthetic.reading import findings_in
from fedtar_flare.synthetic.reports import GENERIC, STYLES, State, write_report
from fedtar_flare.synthetic.vocabulary import FINDINGS, KNOWN_FINDINGS, KNOWN_KINDS, NEW_FINDINGS, NEW_KINDS
from tools.make_small_model import HELD_OUT_SEED_STEP, main, phantoms, scores_of_sight, volume_preparation
from tools.phantom_pairs import phantom_patients

SMALL = preset("small")


@pytest.fixture(scope="module")
def small():
    torch.set_num_threads(1)
    return build_model(SMALL)


def test_a_volume_in_memory_is_prepared_like_a_series_on_disk(tmp_path):
    hu, spacing_mm, (report, _), *_ = next(phantom_patients(1, 3))[0]
    write_ct_series(tmp_path / "ct", hu, spacing_mm, patient_id="p", study_datetime=datetime(2020, 1, 1))
    visit = Visit("p", "v", datetime(2020, 1, 1), tmp_path / "ct", report, "ct")
    from_disk = prepare(visit, Size(64, 16), tmp_path / "cache")
    in_memory = volume_preparation(Size(64, 16))(hu, spacing_mm)
    assert np.array_equal(from_disk.image, in_memory.image)
    np.testing.assert_allclose(from_disk.position_mm, in_memory.position_mm, atol=1e-3)


def test_the_command_writes_a_model_and_heads_that_fit_it(tmp_path, capsys, monkeypatch):
    steps = [f"--{part}=2" for part in ("patients", "held-out", "sight", "writer", "presence")]
    start, out = ASSETS / "small", tmp_path / "out"
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "tokenizer.json").write_bytes((start / "tokenizer.json").read_bytes())
    arguments = ["--preset", "tiny", "--start", str(tmp_path / "start"), "--out", str(out), "--threads", "1"]
    assert main([*arguments, *steps]) == 0 and "changes F1" in capsys.readouterr().out
    config = preset("tiny", weights=str(out / "model.safetensors"), tokenizer=str(out / "tokenizer.json"))
    monkeypatch.setattr(diagnosis, "head_file", lambda name: str(out / "diagnosis.safetensors"))
    known = torch.tensor([name in KNOWN_FINDINGS for name in FINDINGS])
    for prompts in (PROMPTS["memory"], {"prompt_classes": "levels", "prompt_place": "memory"}):
        model = build_model(config)
        assert model.untrained == ()
        settings = {"labeler": "synthetic", "slices": 4, "seed": 0, "head_weights": "small", **prompts}
        diagnosis.extend(model, {"candidates": 1, "complete": False, "certain": 0.5, **settings})
        weight = model.diagnosis.head.weight.flatten(1)
        assert weight[known].any(1).all() and not weight[~known].any(), "nobody taught the new findings"


def test_the_small_model_sees_findings_degrees_and_changes_in_new_phantoms(small):
    held_out = phantoms(12, HELD_OUT_SEED_STEP + 7, SMALL, lambda line: None)
    texts, sight = write_reports(small, build_tokenizer(SMALL), held_out.images), build_model(SMALL)
    settings = {"labeler": "synthetic", "prompt_classes": "levels", "prompt_place": "memory", "head_weights": "small"}
    diagnosis.extend(sight, {"candidates": 1, "complete": False, "certain": 0.0, "seed": 0, **settings})
    clinical = finding_f1(list(map(frozenset, held_out.states)), [findings_in(text) for text in texts])
    assert language_scores([reports[0] for reports in held_out.reports], texts)["bleu_4"] > 0.7
    scores = scores_of_sight(sight, sight.diagnosis, held_out)
    assert clinical["finding_f1"] > 0.8 and scores["degrees right"] > 0.7 and scores["changes F1"] > 0.6, scores


def test_the_small_model_has_seen_no_new_finding_and_its_card_says_so(small):
    data = phantoms(5, HELD_OUT_SEED_STEP + 8, SMALL, lambda line: None, NEW_FINDINGS)
    texts = write_reports(small, build_tokenizer(SMALL), data.images)
    assert sum(bool(findings_in(text) & set(NEW_FINDINGS)) for text in texts) <= 1, texts
    card = " ".join((ASSETS / "small" / "README.md").read_text().split())
    knows, _, unseen = card.partition("It has seen no image of")
    assert all(kind in knows for kind in KNOWN_KINDS)
    assert all(kind.replace("_", " ") in unseen for kind in NEW_KINDS)


def test_no_report_of_a_site_is_longer_than_the_model_writes():
    tokenizer = build_tokenizer(preset("small", max_length=192))
    for new, wording in product(NEW_FINDINGS, (GENERIC, *chain(*STYLES))):
        worst = {name: State(2, "larger") for name in (*KNOWN_FINDINGS[2:6], new)}
        text = write_report(wording, worst, resolved=KNOWN_FINDINGS[:1], follow_up=True, older=True)
        assert len(tokenizer.encode(text)) <= SMALL.max_length, text
