"""Runs made again: without a patient who withdrew, as if it had never been seen; and as shadows, for an audit."""

import copy
import json
from pathlib import Path

import pytest
import torch
from command import failing, passing

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import write_text
from fedtar_flare.data.cells import Timeline
from fedtar_flare.learning.canaries import canaries
from fedtar_flare.models.adapters.peft_file import read_adapter, read_adapter_info
from fedtar_flare.provision.resume import remake_of
from fedtar_flare.reporting.run import read_run
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.runtime.shadows import train_shadow
from fedtar_flare.runtime.simulation import ExecutorSite, InThisProcess, run_in_process
from fedtar_flare.site.cohort import load_cohort
from fedtar_flare.site.context import Site
from fedtar_flare.site.model_audit import audit_model, training_on
from fedtar_flare.site.site_file import load_site_config
from fedtar_flare.site.state import SiteState
from fedtar_flare.testing import last_checkpoint, same_bits

SITES = ("site-1", "site-2")
ROUNDS, CAME = 2, 2
JOB = {"preset": "tiny", "num_rounds": ROUNDS, "time_steps": 2, "data": {"synthetic_patients": 16}}
JOB |= {"training": {"local_steps": 2, "batch_size": 4, "lr": 1e-2}, "model": {"num_beams": 1, "max_length": 8}}
SLOW = ("fedtar", "fedmrg", "scaffold", "fedyogi", "local_patient")
METHODS = ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
"""One of each kind of state: none, a patient part with an outer step, a bank, variates, a server's optimiser, all."""


class Federation:
    """Two simulated hospitals, and the list of patients whom the first one excludes."""

    def __init__(self, folder):
        self.folder, self.excluded = folder, folder / "sites" / "out.txt"
        for name, more in zip(SITES, ("exclude: out.txt\n", ""), strict=True):
            write_text(self.site_file(name), f"source: synthetic\nstate_dir: {folder / 'state'}\n{more}")
        self.excluded.write_text("")
        config = load_site_config(SITES[0], workspace=None, simulator=True)
        self.cohort = load_cohort(config, SITES[0], timeline=Timeline(2), synthetic_patients=16)
        self.patient = self.cohort.samples("train", 2)[0].visit.patient_id

    def site_file(self, name):
        return self.folder / "sites" / f"{name}.yaml"

    def run(self, name, method, comes_in=0, **server):
        """Results of a run into which the patient comes in a round; in no round by default."""
        recipe = MethodRecipe(method, server={"evaluate_every": ROUNDS, **server}, **JOB)
        folder = self.folder / name
        sites = {site: ExecutorSite(site, copy.deepcopy(recipe.executor), folder / site) for site in SITES}
        controller = InThisProcess(folder, sites, **recipe.controller_arguments)
        admit = controller.membership.admit_late_sites

        def begin_round(w, r):
            if r == comes_in:
                self.excluded.write_text("")
            admit(w, r)

        controller.membership.admit_late_sites = begin_round
        self.excluded.write_text("" if comes_in == 1 else self.patient)
        controller.run()
        self.excluded.write_text(self.patient)
        assert not controller.panics, controller.panics
        return controller.results_folder

    def purge(self, *options):
        where = ("--simulated", SITES[0], "--site-file", self.site_file(SITES[0]))
        return passing("site", "purge", "--patient", self.patient, *where, *options)


@pytest.fixture
def federation(tmp_path, monkeypatch, home):
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    return Federation(tmp_path)


def apart(a, b):
    """The largest difference of two checkpoints, in weights and in the method's state."""
    pairs = ((a.weights, b.weights), (a.method, b.method))
    assert all(one.keys() == other.keys() for one, other in pairs)
    return max(float((one[name] - other[name]).abs().max()) for one, other in pairs for name in one)


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_those_of_a_run_that_never_saw_the_patient(federation, method):
    seen = federation.run("seen", method, comes_in=CAME)
    assert f"fedtar forget JOB --before {CAME}." in federation.purge("--yes")
    files = [file for file in (federation.folder / "state").rglob("*") if file.is_file()]
    assert files and not [f for f in files if federation.patient.encode() in f.read_bytes()], "who it is stays"
    remake = remake_of(seen, CAME)
    assert (remake["after"], remake["rounds"]) == (CAME - 1, ROUNDS - CAME + 1)
    steps = [step for step in read_run(seen).steps if step.round >= CAME]
    assert remake["answers"] == sum(len(step.sites) for step in steps) + 2 * remake["rounds"]
    asked = json.loads(passing("forget", seen, "-w", federation.folder, "--before", CAME, "--json"))
    assert asked == remake

    again = federation.run("again", method, resume_from=str(seen / "checkpoint"), remake_before=CAME)
    never = federation.run("never", method)
    with_patient, made_again, without = map(last_checkpoint, (seen, again, never))
    assert apart(made_again, without) <= 1e-6
    weights = [made_again.weights.values(), with_patient.weights.values()]
    same = all(torch.allclose(a, b, rtol=0, atol=1e-4) for a, b in zip(*weights, strict=True))
    assert same is (method in ("local", "local_patient")), "whose server has no trained weights"
    starts = [read_run(results).start for results in (seen, again)]
    assert starts[0].run_id != starts[1].run_id and starts[1].first_round == CAME
    states = [SiteState(federation.folder / "state", start.run_id, SITES[0]) for start in starts]
    assert [state.first_round(federation.patient, 1) for state in states] == [CAME, None]
    rest = {s.visit.patient_id for s in federation.cohort.samples("train")} - {federation.patient}
    assert [{state.first_round(who, 1) for who in rest} for state in states] == [{1}, {1}]
    for results, before in ((seen, 0), (seen, ROUNDS + 1), (again, CAME - 1)):
        failing("forget", results, "-w", federation.folder, "--before", before)


def test_the_round_that_is_named_is_one_in_which_enough_patients_came(tmp_path):
    state = SiteState(tmp_path, "run", "north")
    for r, patients in ((1, "abcde"), (2, "abcdefghi"), (4, "ijx"), (5, "xyzuvw")):
        state.note_patients(patients, r)
    assert [state.first_round(who, 1) for who in "afxyo"] == [1, 2, 4, 5, None]
    assert [state.first_round(who, 4) for who in "afxyo"] == [1, 2, 2, 5, None]
    assert [state.first_round(who, 9) for who in "afxy"] == [1, 1, 1, 1]
    assert not any(file.is_file() and "fghi" in file.read_text() for file in tmp_path.rglob("*.json"))


def test_a_state_of_another_round_is_never_taken_for_the_one_that_is_gone(tmp_path):
    before, new = (SiteState(tmp_path, run, "north") for run in ("run", "new"))
    for name in ("0001-02", "0003-01", "0003-02", "mixture"):
        before.write(name, {"a": torch.full((1,), float(name[3:4]) if name[0] == "0" else 0.0)}, {})
    before.note_patients("ab", 1)
    before.note_patients("abc", 3)
    assert not new.take_over("run/0002-02", ["mixture"]) and not new.take_over("none/0001-02", [])
    assert not new.folder.exists()
    assert SiteState(tmp_path, "last", "north").take_over("run/0004-02", []), "it has trained in no round since"
    assert new.take_over("run/0001-02", ["mixture", "of another method"])
    assert new.names("") == ["0001-02", "mixture"] and [new.first_round(who, 1) for who in "abc"] == [1, 1, None]
    assert new.take_over("run/0003-02", []) and new.versions() == ["0001-02"], "once only"


@pytest.mark.slow
def test_the_command_makes_the_rounds_again_by_the_same_schedule(tmp_path, home):
    """Nobody has withdrawn, so that the weights are the same to the bit: from a checkpoint, and from the start."""
    common = {"FEDTAR_HOME": str(home)}
    small = ("--preset", "tiny", "--local-steps", 2, "--patients", 16, "--time-steps", 2, "-r", 2, "-n", 2)
    runs = [json.loads(passing("simulate", "--json", "-w", tmp_path / "a", *small, **common))["results"]]
    for name, before in (("b", 2), ("c", 1)):
        command = ("forget", runs[0], "-w", tmp_path / name, "--before", before, "--yes", "--json")
        runs.append(json.loads(passing(*command, **common))["results"])
    first, *others = (last_checkpoint(Path(results)) for results in runs)
    assert all(same_bits(first, other) for other in others)
    assert [read_run(results).start.first_round for results in runs] == [1, 2, 1]
    assert len({read_run(results).start.run_id for results in runs}) == 3


@pytest.mark.slow
def test_on_the_run_s_own_patients_a_shadow_is_the_run_and_an_audit_compares_with_others(
    tmp_path, own_home, monkeypatch
):
    """One site with canaries, so that the mean is its own update."""
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path / "sites"))
    write_text(tmp_path / "sites" / "north.yaml", "source: synthetic\ncanaries: 2\n")
    settings = {"training": {"local_steps": 2}, "data": {"synthetic_patients": 48}}
    settings["model"] = {"num_beams": 1, "max_length": 24}
    recipe = MethodRecipe("fedavg", preset="tiny", num_rounds=1, time_steps=2, **settings)
    adapter = run_in_process(recipe, ["north"], tmp_path / "run") / "adapter"
    site, config = Site.outside_of_jobs(tmp_path, "north"), load_site_config("north", workspace=None, simulator=True)
    given = []

    def shadow(cohort, run, rounds, **others):
        given.append((cohort, run, rounds, others))
        return train_shadow(cohort, run, rounds, **others)

    found = audit_model(adapter, site, config, {}, print, 2, shadow)
    start, shared = found["parts"].values()
    low, high = shared["shadow_interval"]
    assert low <= shared["shadow_found"] <= high and "shadow_auc" not in start
    assert 0 <= shared["shadow_auc"] <= 1 and shared["written"] == 0 and len(shared["exposures"]) == 2
    assert {"shadow_auc", "shadow_found", "exposure"} < set(found["rounded"]["shared adapter"])
    with pytest.raises(ConfigError, match="--shadows 1: 2 or more"):
        audit_model(adapter, site, config, {}, print, 1, shadow)

    (half, run, rounds, others), before = given[0], sorted(own_home.rglob("*"))
    whole = training_on(half, {p.patient_id for p in half.patients if half._split_of(p.patient_id) == "train"})
    without = train_shadow(whole, run, rounds, **others)
    planted = canaries(whole, read_adapter_info(adapter)["run_id"], 2, without.tokenizer, tmp_path)
    same = train_shadow(whole.with_samples([*whole.samples(None), *planted]), run, rounds, **others).shared()
    end = read_adapter(adapter)
    assert all(torch.allclose(same[name], value, atol=1e-7) for name, value in end.items())
    assert not all(torch.allclose(without.shared()[name], value, atol=1e-4) for name, value in end.items())
    assert before == sorted(own_home.rglob("*")), "a shadow run leaves nothing"
    with pytest.raises(ConfigError, match="scaffold"):
        train_shadow(whole, {**run, "job": run["job"] | {"method": "scaffold"}}, 1, **others)
