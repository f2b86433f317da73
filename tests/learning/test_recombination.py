"""One finding more: what is put where, and that nothing else changes."""

from __future__ import annotations

import pytest

from fedtar_flare.data.timeline import Timeline
from fedtar_flare.learning.labels import labeler
from fedtar_flare.learning.plain_words import sentences
from fedtar_flare.learning.recombination import Recombination
from fedtar_flare.synthetic.cohort import synthetic_cohort

LABEL = labeler("synthetic", "positive").label
FINDINGS = labeler("synthetic").findings
CLEAR = "CT of the chest. The lungs are clear. There is no pleural effusion. The heart is normal."
NODULE = "CT of the chest. There is a small left upper lobe nodule. There is no pleural effusion. The heart is normal."
EFFUSION = "CT of the chest. The lungs are clear. There is a large right pleural effusion. The heart is normal."
CAVITY = "CT of the chest. There is a small upper lobe cavity. There is no pleural effusion. The heart is normal."


def put_into(report: str, *others: str, times: int = 20) -> dict[str, str]:
    """Texts by the finding that was put in, over many draws."""
    recombination = Recombination([report, *others], [f"p{n}" for n in range(len(others) + 1)], LABEL)
    found = [recombination.with_one_more(report, f"{n}") for n in range(times)]
    return {FINDINGS[finding]: text for text, finding in filter(None, found)}


def test_a_sentence_that_never_stands_beside_the_finding_gives_way_to_it():
    found = put_into(CLEAR, NODULE, NODULE, EFFUSION, EFFUSION)
    assert found == {"nodule_left": NODULE, "effusion_right": EFFUSION}


def test_else_it_stands_after_the_sentence_before_which_it_stood():
    pneumothorax = CLEAR.replace("effusion. ", "effusion. There is a small left pneumothorax. ")
    found = put_into(NODULE, CLEAR, pneumothorax, pneumothorax)
    assert found == {
        "pneumothorax_left": NODULE.replace("effusion. ", "effusion. There is a small left pneumothorax. ")
    }


def test_a_finding_of_one_report_is_put_into_no_other():
    assert put_into(CLEAR, NODULE, EFFUSION) == {}
    assert set(put_into(CLEAR, NODULE, EFFUSION, EFFUSION)) == {"effusion_right"}


@pytest.mark.parametrize(("patients", "least", "put"), [("abb", 1, False), ("abc", 2, True), ("abc", 3, False)])
def test_a_finding_of_too_few_patients_is_put_into_no_report_however_many_visits_have_it(patients, least, put):
    recombination = Recombination([CLEAR, NODULE, NODULE], patients, LABEL, least)
    assert (recombination.with_one_more(CLEAR, "0") is not None) is put


def test_a_report_that_states_all_there_is_stays_as_it_is():
    assert put_into(NODULE, NODULE, NODULE) == {}


def test_a_site_s_other_way_of_writing_does_not_mix_with_this_one():
    other = "Structured report. Parenchyma: tiny left apical nodule. Pleura: dry on both sides. Heart: normal."
    found = put_into(CLEAR, NODULE, NODULE, other, other)
    assert found == {"nodule_left": NODULE}


def test_the_same_seed_draws_the_same():
    recombination = Recombination([CLEAR, NODULE, NODULE, EFFUSION, EFFUSION, CAVITY, CAVITY], "abcdefg", LABEL)
    texts = [recombination.with_one_more(CLEAR, f"{n}") for n in range(20)]
    assert texts == [recombination.with_one_more(CLEAR, f"{n}") for n in range(20)]
    assert len({text for text, _ in filter(None, texts)}) == 3


def test_what_hardly_any_report_states_is_put_in_by_a_plain_sentence_and_only_its_denial_gives_way():
    denied = CLEAR.replace("The heart", "No pneumothorax is seen. The heart")
    recombination = Recombination([denied, EFFUSION, EFFUSION, CAVITY], "abcd", LABEL, findings=FINDINGS)
    found = [recombination.with_one_more(denied, f"{n}") for n in range(200)]
    texts = {FINDINGS[finding]: text for text, finding in filter(None, found)}
    assert set(texts) == set(FINDINGS)  # every finding can be told
    said = texts.pop("effusion_right")
    assert "There is a large right pleural effusion." in said  # in the site's own words where it has them
    assert texts["cavity"] == f"{denied} There is cavity."  # one patient's words are told to nobody
    assert texts["pneumothorax_left"] == CLEAR.replace("The heart", "There is left pneumothorax. The heart")


@pytest.mark.parametrize("name", ["chexpert-rules", "ctrate-rules"])
def test_plain_sentences_of_the_rule_based_labelers_state_their_finding(name):
    rules = labeler(name, "positive")
    recombination = Recombination(["Normal."], ["a"], rules.label, findings=rules.findings)
    found = [recombination.with_one_more("The scan is good.", f"{n}") for n in range(300)]
    told = {finding: text for text, finding in filter(None, found)}
    assert all(rules.label(text)[finding] for finding, text in told.items())
    assert len(told) >= 0.6 * len(rules.findings)


@pytest.mark.parametrize("style", [1, 2, 3, 4, 5, 6])
def test_every_report_of_every_style_states_what_it_stated_and_one_finding_more(tmp_path, style):
    cohort = synthetic_cohort(f"site-{style}", folder=tmp_path, patients=12, timeline=Timeline(2), seed=0)
    reports = [visit.report for patient in cohort.patients for visit in patient.visits]
    recombination = Recombination(reports, [f"{n}" for n in range(len(reports))], LABEL)
    own = {sentence for report in reports for sentence in sentences(report)}
    found = [(report, recombination.with_one_more(report, f"{n}")) for n, report in enumerate(reports)]
    assert sum(more is not None for _, more in found) >= 0.8 * len(reports)
    for report, more in found:
        if more is not None:
            text, finding = more
            before, after = LABEL(report), LABEL(text)
            assert [i for i in range(len(before)) if before[i] != after[i]] == [finding] and after[finding]
            assert set(sentences(text)) <= own
