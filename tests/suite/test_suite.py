"""Suites: plans, runs by the command, results, differences."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command import passing
from labelers import published
from loky import cpu_count
from made_up_results import keep, parsed
from tables import cases

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.learning.report_labeler import import_labeler
from fedtar_flare.record.events import Evaluation, SiteScores
from fedtar_flare.record.log import scored_round
from fedtar_flare.registry import method, own_names
from fedtar_flare.suite import page
from fedtar_flare.suite.file import Suite, read_suite, shipped
from fedtar_flare.suite.plan import Experiment, experiments, require_hospitals, site_files
from fedtar_flare.suite.results import COMPARED, differences, interval_of, read_results, result_file, seed_means
from fedtar_flare.suite.run import run_suite

TINY = cases(__file__, "tiny.yaml")
SITES = TINY["sites"]
NO_WORDS = {"matches": [0] * 4, "guesses": [9, 8, 7, 6], "hypothesis_length": 9, "reference_length": 9, "rouge_l": 0.0}


def suite_file(folder: Path, **changes) -> Path:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Both arms, run by the command."""
    folder, home = tmp_path_factory.mktemp("suite"), tmp_path_factory.mktemp("home")
    file = suite_file(folder)
    printed = passing("compare", file, "-o", folder / "out", FEDTAR_HOME=str(home))
    return file, folder / "out", printed, [f for f in home.glob("state/*/*") if f.parent.name != "sites"]


@pytest.mark.slow
def test_every_cell_has_a_result_that_says_how_it_was_made_and_is_run_again_only_with_another_setting(ran, tmp_path):
    file, folder, _, state = ran
    planned = experiments(read_suite(file))
    for result in read_results(folder, planned):
        content, experiment = result.content, result.experiment
        assert content["settings"] == experiment.recipe and content["seed"] == 0 and content["versions"]["torch"]
        assert len(result.members()) == sum(sum(counts["test"]) for counts in content["counts"].values())
        assert ("site-3" in content["outside"]) is (result.arm == "fedavg"), "local-only has nothing to give away"
        assert not {"text", "reference"} & {name for row in result.rows for name in row}
    assert not state, "a finished run leaves no state of its sites"
    lines: list[str] = []
    assert run_suite(folder, planned, say=lines.append) == [] and lines == ["2 runs, 2 of them done before"]
    longer = read_suite(suite_file(tmp_path, settings=TINY["settings"] | {"num_rounds": 2}))
    assert read_results(folder, experiments(longer)) == []


@pytest.mark.slow
def test_a_runs_reports_are_kept_and_can_be_scored_by_any_labeler(ran, tmp_path):
    file, folder, *_ = ran
    fedavg, alone = (folder / "runs" / one.file_name for one in experiments(read_suite(file)))
    files = [file for file in (folder / "runs").rglob("*") if file.is_file()]
    folders = {file.relative_to(fedavg).parent.as_posix() for file in files if fedavg in file.parents}
    assert folders == {*TINY["sites"], "outside/site-3"}
    assert {file.name for file in files} == {f"report-scores-000{number}.jsonl" for number in (0, 1)}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    lines = [(fedavg / site / "report-scores-0001.jsonl").read_text().splitlines() for site in TINY["sites"]]
    rows = [json.loads(line) for of_site in lines for line in of_site]
    assert all(row["text"] and row["reference"] and row["patient_id"] and row["visit_id"] for row in rows)
    import_labeler(published(tmp_path / "hub", "radbert")[0], labeler := tmp_path / "labeler")
    found = json.loads(passing("score", fedavg, "--labeler", labeler, "--against", alone, "--json"))
    assert found["reports"] == len(rows) and "radbert_macro_f1" in {one["score"] for one in found["against"]}
    assert "ctrate-rules" in passing("score", fedavg / "outside/site-3", "--labeler", "ctrate-rules", "--round", 0)


@pytest.mark.slow
def test_the_page_compares_the_arms_where_they_were_scored(ran):
    file, folder, printed, _ = ran
    assert str(folder / "comparison.html") in printed
    text, root = parsed(folder / "comparison.html")
    assert text.count("each hospital alone") > 1 and "hospitals outside" in text
    assert "http://" not in text.split("<svg")[0]
    assert not re.search(r"#[0-9a-f]{6}", text.split("</style>")[1]), "colours follow the page's theme"
    fedavg, alone = results = read_results(folder, experiments(read_suite(file)))
    said = "".join(root.find(".//p[@class='verdict']").itertext())
    assert "best BLEU-4" in said and "each hospital alone" in said and "Best in other scores: " in said
    assert [fedavg.arm, alone.arm] == ["fedavg", "alone"] and fedavg.content["bytes"] > 0
    assert len(seed_means([fedavg], "outside", "token_loss")) == 1 and not seed_means([alone], "outside", "token_loss")
    against = {one.score: one for one in differences(results, "fedavg")}
    assert [*against] == [name for name in COMPARED if name in against]
    assert {"degree_accuracy", "bleu_4", "cider"} <= {*against}  # no draft claims a change: no column of changes
    assert all(math.isfinite(one.difference.value) for one in against.values())
    for one in (against["bleu_4"], against["cider"]):
        assert one.difference.low <= one.difference.value <= one.difference.high and 0 <= one.p <= 1
    for one in results:  # a hospital's mean token loss, from its reports' scores and from the run's evaluation
        event = next(e for e in one.content["evaluations"] if e["round"] == one.content["scored_round"])
        for site in TINY["sites"]:
            rows = [row for row in one.members() if row["site"] == site]
            assert interval_of("token_loss", [rows]).value == pytest.approx(event["sites"][site]["all"]["token_loss"])


def test_a_difference_is_what_the_rows_say_and_the_same_results_differ_by_nothing(tmp_path):
    planned = experiments(Suite(**TINY | {"seeds": [0, 1]}))
    finding = "pneumothorax_left"
    true = {"personal": True, "when": "end", "findings": [finding], "changes": [[finding, "new"]], **NO_WORDS}
    for experiment in planned:
        better = experiment.name == "alone"
        drafted = {"findings_in_text": [finding] * better, "changes_in_text": [[finding, ["resolved", "new"][better]]]}
        ciders = {f"{n}": n / 10 + better / 2 for n in range(8)}
        own = [{"site": site, "patient_id": n, "cider": cider} for site in SITES for n, cider in ciders.items()]
        rows = [true | drafted | one for one in own]
        keep(tmp_path, experiment, {}, rows)
    tests = {test.score: test for test in differences(read_results(tmp_path, planned), "fedavg")}
    for score, more in (("cider", 0.5), ("finding_f1_new", 1.0), ("finding_change_micro_f1", 1.0)):
        assert tests[score].difference == pytest.approx((more, more, more)) and tests[score].p < 0.001
    assert tests["bleu_4"].difference.value == 0 and tests["bleu_4"].p == 1
    lines = (file := read_results(tmp_path, planned)[0].rows_path).read_text().splitlines()
    file.write_text("\n".join(lines[:8]))
    assert len(differences(read_results(tmp_path, planned), "fedavg")) == len(tests), "at the site that both have"
    file.write_text("\n".join(lines)[:-9])
    with pytest.raises(ConfigError, match=f"{file.name}: it is missing, changed or cut short"):
        differences(read_results(tmp_path, planned), "fedavg")


class Dying(Experiment):
    """A run whose process is killed."""

    def build(self, threads=1):
        os.kill(os.getpid(), signal.SIGKILL)


def test_all_scores_are_of_the_best_round_that_can_be_compared():
    def scored(round_, sites, generic=""):
        sites, generic = ({site: SiteScores() for site in names} for names in (sites, generic))
        return Evaluation(round=round_, sites=sites, generic=generic)

    every = [scored(0, "ab"), scored(1, "ab"), scored(2, "ab")]
    assert scored_round(every, 1) == 1
    assert scored_round(every, None) == 2, "the last where nobody has validation patients"
    assert scored_round(every[::2], 1) == 2, "the best was not scored"
    assert scored_round([scored(0, "a"), scored(1, "a"), every[2]], 1) == 2, "b came late"
    assert scored_round([*every[:2], scored(2, "ab", "ab")], 1) == 2, "fine-tuned at the end"


@pytest.mark.slow
def test_two_processes_run_what_can_be_run(tmp_path, monkeypatch):
    """What a killed process was to run is told, and the others go on."""
    monkeypatch.setenv("FEDTAR_HOME", str(tmp_path / "home"))
    settings = {name: value for name, value in TINY["settings"].items() if name != "torch_threads"} | {"num_rounds": 2}
    changes = {"cohort": {"site-2": {"own_words": 0.5}}, "outside": [], "settings": settings}
    suite = Suite(**TINY | changes | {"arms": {"fedtar": {"method": "fedtar", "label": "FedTAR <b>"}}})
    good = experiments(suite)
    bad = Dying(**vars(replace(good[0], name="dies")))
    lines: list[str] = []
    (failed,) = run_suite(tmp_path, [bad, *good], processes=2, say=lines.append)
    assert failed.startswith("dies, seed 0:") and "process died" in failed
    assert len(lines) == 3 and len(read_results(tmp_path, good)) == len(good)
    for one in read_results(tmp_path, good):
        assert one.content["torch_threads"] == max(1, cpu_count() // 2)
        evaluations = {event["round"]: set(event["sites"]) for event in one.content["evaluations"]}
        assert evaluations == {r: {"site-1", "site-2"} for r in (0, 1, 2)}
        assert set(one.content["counts"]) == {"site-1", "site-2"}
        assert {row["site"] for row in one.members()} == {"site-1", "site-2"}
    fedtar = read_results(tmp_path, good)[0]
    assert [row[0] for row in fedtar.content["curves"]["alpha"]] == [0, 1, 2]
    text, root = parsed(page.write_page(tmp_path, suite, good))
    drawn = [heading.text for heading in root.iter("h3") if "over rounds" in heading.text]
    parts = ("CIDEr of each hospital", "Scores", "Validation loss", "Alpha")
    assert drawn == [f"{part} over rounds" for part in parts] and "FedTAR &lt;b&gt;" in text
    assert "The shared adapter alone, at the hospitals that took part" in text


def test_two_commands_with_one_folder_make_each_run_once(tmp_path, monkeypatch):
    made = []

    def run(folder, experiment, _):
        made.append(experiment.name)
        time.sleep(0.2)
        write_text(result_file(folder, experiment), "{}")

    monkeypatch.setattr("fedtar_flare.suite.run.run_experiment", run)
    with ThreadPoolExecutor(2) as commands:
        ends = [commands.submit(run_suite, tmp_path, experiments(Suite(**TINY)), say=len) for _ in range(2)]
    assert [end.result() for end in ends] == [[], []] and sorted(made) == ["alone", "fedavg"]


def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "nowhere"))
    lines: list[str] = []
    failed = run_suite(tmp_path, experiments(Suite(**TINY)), say=lines.append)
    assert [line.split(",")[0] for line in failed] == ["fedavg", "alone"] and len(lines) == 3


@pytest.mark.slow
def test_a_worker_ends_with_the_process_that_started_it_even_when_that_is_killed():
    """What it has to do goes on for ten minutes; the pipe's end says that nobody is left who could write to it."""
    code = """
import os, time
from fedtar_flare.suite.run import single_worker
pool = single_worker()
print(pool.submit(os.getpid).result(), flush=True)
pool.submit(time.sleep, 600).result()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        assert worker != process.pid
        process.kill()
        assert process.communicate(timeout=600)[0] == ""
    except subprocess.TimeoutExpired:
        os.kill(worker, signal.SIGKILL)
        raise


SUITES = sorted(shipped().values())
REPORTS = {name for name in own_names() if method(name).reports and name != "evaluate"}
ARMS = {"local": {"method": "local"}, "fedavg": {"method": "fedavg"}}
SMALL = {"name": "s", "sites": ["site-1", "site-2", "site-3"], "settings": {"preset": "tiny"}, "arms": ARMS}


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_shipped_suite_can_be_built_and_documents_say_how_many_runs(path, repository, tmp_path, monkeypatch):
    (tmp_path / path.stem).mkdir()  # the folder of its results
    monkeypatch.chdir(tmp_path)
    suite = read_suite(path.stem)
    assert suite == read_suite(path)
    planned = experiments(suite)
    assert len({one.file_name for one in planned}) == len(planned)
    if said := re.search(r"(\d+) runs\.", path.read_text().split("name:")[0]):
        assert int(said[1]) == len(planned)
    lines = (repository / "docs" / "research" / "suites.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("|") and f"`{path.stem}`" in line)
    assert str(len(planned)) in re.findall(r"\d+", row.rpartition("|")[0].rpartition("|")[2])
    if path.stem in ("quick", "paper_tables"):  # the suites of all methods that write reports
        assert {arm["method"] for arm in suite.arms.values()} == REPORTS
        assert len({one.digest for one in planned}) == len(planned), "no two arms are equal"


def test_files_of_kept_results_can_be_run_but_for_those_of_scenarios(repository):
    for file in (repository / "docs" / "research" / "suites").glob("*.yaml"):
        if file.stem in ("alphas", "arrival", "joining", "spreading"):
            with pytest.raises(ConfigError):
                experiments(read_suite(file))
        else:
            assert experiments(read_suite(file))


def test_a_result_is_made_again_for_another_value_of_a_setting_and_for_a_default_that_changes(monkeypatch):
    def digest(**settings):
        arms = {"a": {"method": "fedtar", "settings": settings}}
        return experiments(Suite(name="s", sites=["site-1"], arms=arms))[0].digest

    before = digest()
    assert before == digest(patient={"components": 16}) == digest(server={"eta": 0.01}) != digest(server={"eta": 0.02})
    monkeypatch.setitem(method("fedtar").presets["small"], "patient", {"components": 4})
    assert digest() != before


@pytest.mark.parametrize(("change", "words"), cases(__file__, "refused.yaml"))
def test_what_cannot_be_run_is_refused_before_anything_runs(change, words):
    with pytest.raises(ConfigError, match=words):
        experiments(Suite(**{**SMALL, **change}))


def test_real_data_is_asked_for_before_anything_runs(tmp_path, monkeypatch):
    suite = Suite(**SMALL, needs_site_files=True)
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no site-1\.yaml"):
        require_hospitals(suite)
    for site in suite.sites:
        (tmp_path / f"{site}.yaml").write_text(yaml.safe_dump({"source": "synthetic"}))
    with pytest.raises(ConfigError, match="not on phantoms"):
        require_hospitals(suite)
    made_up = Suite(**SMALL, cohort={"patients": 3})
    with pytest.raises(ConfigError, match="unset FEDTAR_SITES"), site_files(made_up, tmp_path / "files"):
        pass
