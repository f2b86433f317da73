import pytest
import yaml
from recorded_runs import RUN_ID, SITES, SOUTH, edit, write_run

from fedtar_flare.reporting.model_card import base_model, model_card, write_model_card
from fedtar_flare.reporting.run import read_run


def head_of(card):
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


def test_the_card_beside_the_adapter(tmp_path):
    run = read_run(write_run(tmp_path))
    (tmp_path / "adapter").mkdir()
    path = write_model_card(run, tmp_path / "adapter")
    assert path == tmp_path / "adapter" / "README.md" and [p.name for p in path.parent.iterdir()] == ["README.md"]
    card = path.read_text(encoding="utf-8")
    assert head_of(card)["library_name"] == "peft" and head_of(card)["license"] == "Apache-2.0"
    for words in (
        f"# Shared adapter of run {RUN_ID}\n\nFrom the warm start to round 3, BLEU-4 improved by ",
        "(FedTAR). They are those of round 3 of 3, the best by validation loss",
        "Not for clinical use",
        "| licence of the base model | Apache-2.0 |",
        "| adapter | 71680 values in 96 tensors, 287 kB in float32 (the whole model: 28 × as much) |",
        "| hospital-north | train | 30 | 21 | 12 |",
        "| alpha\\_form | softmax |",
        "| torch | 2.15.0 |",
        "| alpha, steps 1 to T | 0.333 0.333 0.333 -\\> ",
    ):
        assert words in card, words
    bleu = [f"{100 * run.shown.sites['hospital-north'].all[f'bleu_{n}']:.1f}" for n in (1, 2)]
    assert f"| hospital-north | all | 21 | 8.0 → {bleu[0]} | 8.0 → {bleu[1]}" in card


def test_small_cells_are_blank_and_cannot_be_worked_out_from_totals(tmp_path):
    card = model_card(read_run(write_run(tmp_path)))
    assert f"| {SOUTH} | test | 9 | 5 | \\< 5 |" in card
    assert f"| {SOUTH} | 3 | \\< 5 |  |  |" in card
    assert f"| {SOUTH} | all | 14 |" in card and "| mean of sites | all | 57 |" in card  # scores of 14 and 57 reports
    cells = {"steps": {"1": {"n": 9}, "2": {"n": 3}}, "all": {"n": 12, "bleu_4": 0.5}}
    edit(tmp_path, "evaluation", sites={"a": cells, "b": cells})
    card = model_card(read_run(tmp_path))
    assert "| a | all | over 9 |" in card and "| mean of sites | all | over 18 |" in card
    open_card = model_card(read_run(write_run(tmp_path / "open", min_cell=1)))
    assert f"| {SOUTH} | all | 17 |" in open_card and "| mean of sites | all | 60 |" in open_card


def test_scores_are_those_of_the_adapters_round(tmp_path):
    write_run(tmp_path)
    edit(tmp_path, "validation", at=2, sites={site: {"validation_loss": 0.01, "n": 9} for site in SITES})
    assert "warm start → round 2;" in model_card(read_run(tmp_path))


PARTS = {"encoder_name": "microsoft/cvt-21-384-22k", "decoder_name": "distilgpt2"}
MODELS = [
    ({}, "not stated", None),
    ({"preset": "small"}, "fedtar_flare preset small", None),
    ({"preset": "paper"} | PARTS, ", ".join(["fedtar_flare preset paper", *PARTS.values()]), [*PARTS.values()]),
    ({"base_model": "a: b # c"}, "a: b # c", ["a: b # c"]),
]


@pytest.mark.parametrize(("model", "name", "listed"), MODELS)
def test_base_model_and_licence_are_as_the_settings_state_them(tmp_path, model, name, listed):
    write_run(tmp_path)
    edit(tmp_path, "start", model=model)
    run = read_run(tmp_path)
    assert base_model(run) == name
    head = head_of(model_card(run))
    assert head.get("base_model") == listed and "license" not in head
    assert "| licence of the base model | not stated |" in model_card(run)


def test_names_from_outside_stay_in_their_cell_and_a_run_without_scores_has_a_card(tmp_path):
    card = model_card(read_run(write_run(tmp_path / "a", sites=["a|b", "<i>`c`</i>\n# d"])))
    assert "| a\\|b | train |" in card and "\\<i\\>\\`c\\`\\</i\\> \\# d" in card
    card = model_card(read_run(write_run(tmp_path / "b", until="start")))
    assert "there was no validation patient to choose by" in card and "The run has no evaluation." in card
    assert "nan" not in card.lower().split()
