"""A suite in which visits arrive: which rows are compared, and what its page says of them."""

import json

import pytest
from made_up_results import RIGHT, parsed, write_results

from fedtar_flare.errors import ConfigError
from fedtar_flare.suite import page
from fedtar_flare.suite.arrival import _first_named, _forgotten, of_periods
from fedtar_flare.suite.collect import over_time
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.plan import experiments
from fedtar_flare.suite.results import done
from fedtar_flare.suite.run import result_file, rows_file

SITES = ["site-1", "site-2"]
SPREADS = {"compared": ["site-2"], "joins": {"site-2": 2}, "cohort": {"change": "epidemic", "change_step": 3}}
ARMS = {name: {"method": name} for name in ("local", "fedavg", "fedtar")}
SUITE = {"name": "arrival", "sites": SITES, "seeds": [0, 1], "settings": {"preset": "tiny"}, "arms": ARMS}


def test_reports_are_compared_where_they_were_written_ahead_of_time():
    rows = [{"time_step": t} for t in (1, 2, 3)]
    assert [row["when"] for row in over_time(rows[:1], 0)] == ["start"]
    assert [row["when"] for row in over_time(rows, 2)] == ["past", "past", "end"]
    assert all(row["learnt"] == 2 for row in over_time(rows, 2))


def test_a_scenario_may_say_which_hospitals_it_is_about():
    suite = Suite(**SUITE, scenarios={"spreads": SPREADS, "all": {"compared": SITES, "joins": {"site-2": 2}}})
    found = {one.variant.scenario: (one.variant.compared, one.variant.alone) for one in experiments(suite)}
    assert found == {"spreads": (("site-2",), tuple(SITES)), "all": (tuple(SITES), tuple(SITES))}
    with pytest.raises(ConfigError, match="no 'site-9'"):
        experiments(Suite(**SUITE, scenarios={"spreads": SPREADS | {"compared": ["site-9"]}}))


def test_the_page_shows_scores_by_period_what_is_kept_and_what_is_named_at_first(tmp_path):
    suite = Suite(**SUITE, scenarios={"spreads": SPREADS})
    planned = experiments(suite)
    write_results(tmp_path, planned)
    for one in planned:
        result = json.loads(result_file(tmp_path, one).read_text())
        if result["curves"]:  # as many alphas as periods have begun
            result["curves"]["alpha"] = [[0, 0.9, 0.9, 0.9], [1, 0.8], [2, 0.8, 0.7]]
            result_file(tmp_path, one).write_text(json.dumps(result))
        rows = []
        for row in map(json.loads, rows_file(tmp_path, one).read_text().splitlines()):
            row |= {"findings": [*RIGHT, "cavity"]}
            if row["when"] == "start" or not row["personal"]:
                rows.append(row | {"time_step": 1, "learnt": 0})
                continue
            rows += [row | {"time_step": t, "learnt": t - 1} for t in (2, 3)]
            rows += [row | {"time_step": t, "learnt": learnt, "when": "past", "matches": [learnt] * 4}
                     for learnt in (1, 2) for t in range(1, learnt + 1)]  # fmt: skip
            rows[-5]["findings_in_text"] = ["cavity"] if row["patient_id"].endswith("-0") else []
        lines = [json.dumps(row | {"visit_id": f"{row['patient_id']}-{row['time_step']}"}) for row in rows]
        rows_file(tmp_path, one).write_text("\n".join(lines))
    results = of_periods(done(tmp_path, planned))
    now, then = _forgotten(results[0])
    assert {(row["site"], row["time_step"], row["learnt"]) for row in now} == {("site-2", 1, 2)}
    assert {(row["site"], row["time_step"], row["learnt"]) for row in then} == {("site-2", 1, 1)}
    named = _first_named(results[0])
    assert {site for (site, _), _ in named} == {"site-2"} and len(named) == 6
    text, root = parsed(page.write_page(tmp_path, suite, planned))
    titles = [heading.text for heading in root.iter("h2")]
    assert "Ahead of time" in titles and "When does joining pay?" in titles and "spreads: fedtar" in text
    files = {file.name for file in (tmp_path / "figures").iterdir()}
    assert files >= {"ahead_bleu_4.svg", "ahead_finding_f1_new.svg", "alpha.svg"}
    assert "best by validation" not in text
