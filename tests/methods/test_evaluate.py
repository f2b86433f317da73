"""Federated evaluation: candidates of each site's own file, compared by guarded sums, and nothing is trained."""

import json
from functools import partial

import numpy as np
import pytest
import yaml
from command import passing
from tables import write_table

from fedtar_flare.data.cells import Timeline
from fedtar_flare.methods.evaluate.method import RESULTS_FILE, Compared
from fedtar_flare.metrics.paired_sums import guarded_sums
from fedtar_flare.metrics.significance import patient_sums, share_of_sums
from fedtar_flare.protocol.messages import ok, version
from fedtar_flare.record.events import Alarm, Evaluation
from fedtar_flare.record.log import of_kind, read_events
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.simulation import run_in_process
from fedtar_flare.site.job_records import may_score_drafts
from fedtar_flare.synthetic.cohort import synthetic_cohort
from fedtar_flare.testing import FunctionFederation, Hospital, QuadraticSite

SITES, T, PATIENTS = ("site-1", "site-2"), 2, 16
TINY = {"preset": "tiny", "time_steps": T, "data": {"synthetic_patients": PATIENTS}}
SHORT = {"model": {"max_length": 8, "num_beams": 1}, "training": {"local_steps": 2, "batch_size": 2}}
NAMES = ("careful", "hasty", "job", "run")
evaluation = partial(MethodRecipe, "evaluate", **TINY)


def planted(samples, lost):
    """Drafts that are the reports without every so-many-th sentence."""
    drafts = []
    for sample in samples:
        sentences = sample.visit.report.split(". ")
        drafts.append(". ".join(s for i, s in enumerate(sentences) if i % lost != 1))
    return drafts


def write_drafts(file, samples, drafts):
    pairs = zip(samples, drafts, strict=True)
    write_table(file, [{"study_id": sample.visit.visit_id, "prediction": draft} for sample, draft in pairs])


@pytest.fixture
def sites(tmp_path, home, monkeypatch):
    """Site files of two hospitals with two candidates each; gives test visits and drafts by site."""
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    (tmp_path / "sites").mkdir()
    made = {}
    for site in SITES:
        cohort = synthetic_cohort(site, folder=home / "synthetic", patients=PATIENTS, timeline=Timeline(T), seed=0)
        samples = cohort.samples("test")
        drafts = {"careful": planted(samples, 6), "hasty": planted(samples, 3)}
        for name, texts in drafts.items():
            write_drafts(tmp_path / "sites" / f"{site}-{name}.csv", samples, texts)
        about = {"source": "synthetic", "state_dir": str(tmp_path / "state")}
        about |= {"candidates": {name: f"{site}-{name}.csv" for name in drafts}}
        (tmp_path / "sites" / f"{site}.yaml").write_text(yaml.safe_dump(about, sort_keys=False))
        made[site] = samples, drafts
    return made


def compared(results):
    return of_kind(read_events(results, (Compared,)), Compared)[-1]


@pytest.mark.slow
def test_an_evaluation_compares_what_each_site_has(sites, tmp_path):
    trained = run_in_process(MethodRecipe("fedavg", num_rounds=1, **TINY, **SHORT), SITES, tmp_path / "trained")
    candidates = dict.fromkeys(("careful", "hasty", "nobody", "job"), "") | {"run": str(trained / "adapter")}
    results = run_in_process(evaluation(evaluate={"candidates": candidates}, **SHORT), SITES, tmp_path / "run")
    event = compared(results)
    assert event.sites == {site: dict.fromkeys(NAMES, "scored") | {"nobody": "not-here"} for site in SITES}
    assert {"finding_f1", "presence_f1", "rouge_l"} <= {*event.results}
    assert all({"careful", "hasty", "careful - hasty"} <= {*values} for values in event.results.values())
    by_site = json.loads((results / RESULTS_FILE).read_text())
    assert {site: {*of} for site, of in by_site.items()} == {site: {*NAMES} for site in SITES}
    usual = of_kind(read_events(results), Evaluation)[-1].sites["site-1"].all
    assert by_site["site-1"]["careful"]["rouge_l"] == pytest.approx(usual["rouge_l"], abs=1e-9)
    for site, of in json.loads((trained / "metrics.json").read_text())["final"].items():
        assert by_site[site]["run"]["rouge_l"] == pytest.approx(of["all"]["rouge_l"]), "an adapter scores as in its run"
    assert "token_loss" not in usual and "careful - hasty" in (results / "report.html").read_text()


@pytest.mark.slow
def test_candidates_can_be_arms_of_the_comparison_page(sites, tmp_path):
    arms = {}
    for name in ("careful", "hasty"):
        arms[name] = {"method": "evaluate", "settings": {"evaluate": {"candidates": {name: ""}}}}
    suite = {"name": "drafts", "sites": [*SITES], "references": ["hasty"], "settings": TINY | SHORT, "arms": arms}
    (tmp_path / "drafts.yaml").write_text(yaml.safe_dump(suite))
    passing("compare", tmp_path / "drafts.yaml", "-o", tmp_path / "comparison", FEDTAR_SITES=str(tmp_path / "sites"))
    page = (tmp_path / "comparison" / "comparison.html").read_text()
    assert "careful" in page and "Difference to hasty" in page and "ROUGE-L" in page


def validated(hospital, run_id="run"):
    """The hospital's answer to the one task."""
    hospital.handshake(run_id)
    header = hospital.header(run_id, 1, T, after=version(0, 0), evaluate=True)
    _, start = hospital.handshake(run_id)
    return hospital.run("validate", header, start)[0]


def of_hospital(tmp_path, candidates, **data):
    settings = {"evaluate": {"candidates": candidates}, "data": {"synthetic_patients": PATIENTS, **data}, **SHORT}
    return Hospital(tmp_path, method="evaluate", **settings)


def test_drafts_that_differ_in_one_patient_s_are_withheld(sites, tmp_path):
    (samples, drafts), folder = sites["site-1"], tmp_path / "sites"
    patient = samples[0].visit.patient_id
    pairs = zip(samples, drafts["careful"], strict=True)
    one = ["Clear." if sample.visit.patient_id == patient else text for sample, text in pairs]
    write_drafts(folder / "one.csv", samples, one)
    with (folder / "site-1.yaml").open("a") as file:
        file.write("  one: one.csv\n")
    names = {"careful": "", "one": "", "hasty": ""}
    reply = validated(of_hospital(tmp_path, names, min_cell=2))
    assert reply.payload["candidates"] == {"careful": "scored", "one": "withheld", "hasty": "scored"}
    assert len(reply.payload["sums"]["rouge_l"]["sums"]) == 4
    again = validated(of_hospital(tmp_path, {"one": "", "careful": ""}, min_cell=2), "another")
    assert again.payload["candidates"] == {"one": "withheld", "careful": "scored"}


def test_marks_of_earlier_drafts_are_kept_and_a_few_new_ones_withhold(tmp_path):
    def allowed(marks, least=2, data="data"):
        """``abc/de``: marks a to c of time step 1, and two of step 2."""
        marks = {f"{step} {mark}" for step, part in enumerate(marks.split("/"), 1) for mark in part}
        return may_score_drafts(tmp_path, data, marks, least)

    assert allowed("abcd") and allowed("abcd")
    assert not allowed("abce") and not allowed("abc")
    assert allowed("abef") and not allowed("abeg")
    assert allowed("abc", data="other") and allowed("abc", least=1)
    assert allowed("abcd/abcd", data="steps") and not allowed("abef/abce", data="steps"), "one patient's at step 2"
    assert allowed("abef/abef", data="steps")


@pytest.mark.parametrize("text", ["study_id,prediction\nx,Clear.\n", "no table", None])
def test_a_bad_file_of_drafts_is_an_error_at_that_site_which_tells_nothing(sites, tmp_path, text, caplog):
    file = tmp_path / "sites" / "site-1-hasty.csv"
    file.write_text(text) if text else file.unlink()
    reply = validated(of_hospital(tmp_path, {"careful": "", "hasty": ""}))
    assert reply.status == "error" and reply.reason.startswith("candidate 'hasty' cannot be scored at the site")
    assert "hasty" in caplog.text and (text is None or str(file) in caplog.text or "no draft" in caplog.text)


def test_a_path_in_a_job_is_for_simulations(sites, tmp_path):
    asked = {"evaluate": {"candidates": {"mine": str(tmp_path)}}, **SHORT}
    reply = validated(Hospital(tmp_path, simulated=False, method="evaluate", **asked))
    assert reply.status == "error" and "a job's paths of candidates are for simulations" in reply.reason


class Answering(QuadraticSite):
    """A site that answers the one task with made-up sums of these candidates, changed by ``spoil``."""

    def __init__(self, name, seed, candidates, spoil=None):
        super().__init__(name, [None] * T)
        generator, self.candidates, self.spoil = np.random.default_rng(seed), candidates, spoil
        counts = [generator.integers(1, 9, (30, 1)) + [[0, 4]] for _ in candidates]
        sums = [patient_sums(range(30), rows, share_of_sums) for rows in counts]
        self.sums = {"finding_f1": guarded_sums("finding_f1", sums, 60, 5)} if sums else {}

    def __call__(self, task, header, weights):
        if task != "validate":
            return super().__call__(task, header, weights)
        payload = {"candidates": dict.fromkeys(self.candidates, "scored"), "sums": self.sums}
        if self.spoil:
            self.spoil(payload)
        return ok(header, payload=payload), None


def spoilt(**changes):
    """Changes one score's sums."""
    return lambda payload: payload["sums"]["finding_f1"].update(changes)


def test_the_server_compares_whoever_answers_and_refuses_what_no_site_can_have(tmp_path):
    wrong = {
        "few": spoilt(sums=[1.0, 1.0]),
        "high": spoilt(sums=[9.0, 1.0, 5.0, 5.0]),
        "none": spoilt(products={}),
        "below zero": spoilt(sums=[-5.0, -1.0, -9.0, -9.0]),
        "almost nothing": spoilt(sums=[0.0, 0.0, 1e-300, 1e-300]),
        "odd number": spoilt(n=1e-160),
        "endless spread": spoilt(products={str(i): [1e9] * 4 for i in range(4)}),
        "no number": spoilt(sums=[float("nan"), 1.0, 5.0, 5.0]),
        "infinite": spoilt(sums=[1.0, 1.0, float("inf"), 5.0]),
        "name": lambda payload: payload["candidates"].update(other="scored"),
        "word": lambda payload: payload["candidates"].update(a="perhaps"),
        "score": lambda payload: payload["sums"].update(bleu_4=payload["sums"]["finding_f1"]),
    }
    sites = {name: Answering(name, 1, ["a", "b"], spoil) for name, spoil in wrong.items()}
    sites |= {"site-1": Answering("site-1", 2, ["a", "b"]), "site-2": Answering("site-2", 3, ["a"])}
    sites["idle"] = Answering("idle", 1, [], lambda payload: payload.update(sums={"rouge_l": {"sums": 5}}))
    sites["heavy"] = Answering("heavy", 1, ["a", "b"], spoilt(sums=[0.0, 0.0, 1e9, 1e9]))
    asked = {"evaluate": {"candidates": {"a": "", "b": ""}}, "num_rounds": 1, "time_steps": T}
    (run := FunctionFederation(tmp_path, sites, "evaluate", **asked)).run()
    event = compared(run.results_folder)
    assert {*event.left_out} == {*wrong} and event.sites["site-2"] == {"a": "scored"}
    assert {*event.results["finding_f1"]} == {"a", "b", "a - b"}
    (value, *_), (alarm,) = event.results["finding_f1"]["a"], of_kind(read_events(run.results_folder), Alarm)
    assert "heavy" in alarm.text and value > 0.04, "a say of ten hospitals, not of a million"
    page = (run.results_folder / "report.html").read_text()
    assert "a - b" in page and "Federated evaluation" in page and not run.panics
    scored = {site: {*of} for site, of in json.loads((run.results_folder / RESULTS_FILE).read_text()).items()}
    assert scored == {"heavy": {"a", "b"}, "idle": set(), "site-1": {"a", "b"}, "site-2": {"a"}}
