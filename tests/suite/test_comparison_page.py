import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from made_up_results import parsed, write_results

from fedtar_flare.metrics.significance import Interval, compare, holm, mean_score
from fedtar_flare.reporting.format import score
from fedtar_flare.reporting.plots import Series
from fedtar_flare.suite import charts, page
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.plan import experiments
from fedtar_flare.suite.results import SUMS, compare_scores, difference, read_results
from fedtar_flare.suite.tables import verdict, winner

ARMS = {
    "local": {"method": "local", "label": "each hospital alone"},
    "fedavg": {"method": "fedavg", "label": "FedAvg"},
    "fedtar": {"method": "fedtar", "label": "FedTAR <b>"},
}
SUITE = {"name": "made up", "sites": ["site-1", "site-2"], "outside": ["site-3"], "seeds": [0, 1], "arms": ARMS}


def test_the_page_has_the_tables_and_the_figures_of_the_paper(tmp_path):
    suite = Suite(**SUITE, settings={"preset": "tiny"}, references=["local", "fedtar"])
    write_results(tmp_path, planned := experiments(suite))
    text, root = parsed(page.write_page(tmp_path, suite, planned))
    titles = [heading.text for heading in root.iter("h2")]
    assert {"Difference to each hospital alone", "Difference to FedTAR <b>"} < {*titles}
    assert {"The shared adapter alone, at hospitals outside", "At the hospitals that took part"} < {*titles}
    drawn = [heading.text for heading in root.iter("h3") if "over rounds" in heading.text]
    assert len(drawn) == 6 and drawn[-1] == "Alpha over rounds"
    assert "FedTAR &lt;b&gt;" in text and "http://" not in text.split("<svg")[0]
    assert not re.search(r"#[0-9a-f]{6}", text.split("</style>")[1]), "colours follow the page's theme"
    results = read_results(tmp_path, planned)
    best = suite.arms[next(iter(page.arm_means(results, page.MAIN)))]["label"]
    verdict_ = "".join(root.find(".//p[@class='verdict']").itertext())
    assert verdict_.startswith(f"{best} has the best BLEU-4, ")


def study_rows(draw, good):
    """60 studies of 12 patients, with labels of CheXbert."""
    words = {"matches": [5, 4, 3, 2], "guesses": [8, 7, 6, 5], "hypothesis_length": 8, "reference_length": 8}
    rows = []
    for i in range(60):
        truth = draw.choice(list("bpnu"), 14)
        named = np.where(draw.random(14) < good, truth, draw.choice(list("bpnu"), 14))
        who = {"site": "a", "patient_id": f"p{i % 12}", "visit_id": f"v{i}", "findings": None, "changes": None}
        scores = {"cider": good + (i % 12) / 3 + draw.normal() / 9, "rouge_l": 0.5}
        scores |= {"token_loss": 3 - good * draw.random()}
        rows.append(who | words | scores | {"labels": {"chexbert": ["".join(truth), "".join(named)]}})
    return rows


def test_every_metric_over_studies_draws_studies_and_corrects_for_the_metrics():
    a, b = study_rows(np.random.default_rng(1), 0.6), study_rows(np.random.default_rng(1), 0.5)
    for one, other in zip(a, b, strict=True):
        one["cider"] += 0.3 * float(np.random.default_rng(len(one["visit_id"])).normal() > 0) - other["cider"] % 0.1
    found = {one.score: one for one in compare_scores("x", [(a, b)], "studies")}
    assert set(found) == {name for name in SUMS if name.startswith(("bleu", "rouge", "cider", "token", "chexbert_"))}
    cider, studies = difference("x", "cider", [(a, b)], "studies"), [f"{i:02d}" for i in range(60)]
    order = sorted(range(60), key=lambda i: (a[i]["patient_id"], a[i]["visit_id"]))
    apart = [mean_score(studies, [rows[i]["cider"] for i in order]) for rows in (a, b)]
    assert cider[2:] == compare(apart[:1], apart[1:])
    assert found["token_loss"].difference.value < 0 and found["token_loss"][-2:] == (1, 1), "lower is better"
    alone = {name: difference("x", name, [(a, b)], "studies").p for name in found}
    assert {name: one.p for name, one in found.items()} == pytest.approx(holm(alone))
    whole = difference("x", "cider", [(a, b)], "patients").difference
    assert whole.value == pytest.approx(cider.difference.value) and whole[1:] != cider.difference[1:]


@pytest.mark.parametrize("second, best", [(0.0004, None), (0.0008, "a")])
def test_nobody_is_best_on_a_tie(second, best):
    means, shown = {"a": 0.001, "b": 0.001 - second}, partial(score, "bleu_4")
    assert winner(means, shown) == best
    text = verdict("BLEU-4", means, None, {}, "b", {"a": "A", "b": "B"}, shown)
    assert ("A has the best" in text) == (best is not None)


@pytest.mark.parametrize(
    "low, p, beyond", [(0.01, 0.01, True), (0.01, 0.2, False), (-0.01, 0.01, False), (0.01, None, True)]
)
def test_a_difference_is_beyond_chance_where_its_interval_and_its_p_say_so(low, p, beyond):
    less = {"a": (Interval(0.1, low, 0.2), p)}
    text = verdict("BLEU-4", {"a": 0.5, "b": 0.4}, None, less, "b", {"a": "A", "b": "B"}, partial(score, "bleu_4"))
    assert text.endswith(": beyond chance.") == beyond


def test_no_line_is_drawn_through_rounds_in_which_an_arm_was_not_scored():
    whole = Series("whole", [(0, 1.0, "a"), (1, 2.0, "b"), (2, 3.0, "c")])
    ends = Series("ends", [(0, 1.0, "d"), (2, 5.0, "e")])
    assert charts.gaps([whole]) == [whole]
    assert charts.gaps([whole, ends]) == [whole, replace(ends, points=[(0, 1.0, "d"), (1, None, ""), (2, 5.0, "e")])]
