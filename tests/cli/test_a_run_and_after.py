"""What a user does around a run: synth, report, generate, audit, continue, warmstart."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pydicom
import pytest
from command import failing, fedtar, page_commands, passing
from command import fedtar_here as here
from kits import provisioned
from labelers import published

from fedtar_flare.core.files import write_text
from fedtar_flare.learning.drafting import DISCLAIMER
from fedtar_flare.learning.report_labeler import import_labeler
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.models.adapters.peft_file import read_adapter_info
from fedtar_flare.reporting.run import read_run
from fedtar_flare.runtime import simulation
from fedtar_flare.runtime.simulation import run_in_process


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("user")


@pytest.fixture(scope="module")
def hospitals(place):
    """Two hospitals as ``fedtar data synth`` writes them."""
    folder, options = place / "hospitals", ("-n", "north,south", "--patients", 14, "--time-steps", 2, "--json")
    out = passing("data", "synth", "-o", folder, *options, FEDTAR_HOME=str(place / "home"))
    sites = {site["site"]: site for site in json.loads(out)}
    import_labeler(published(place / "hub", "radbert")[0], folder / "sites" / "labeler")
    file = folder / "sites" / "north.yaml"
    file.write_text("labeler: labeler\n" + file.read_text())
    return sites


@pytest.fixture(scope="module")
def results(place, hospitals):
    """One run on them, through their site files: in this process, laid out as FLARE's simulator leaves it."""
    data = {"alignment": "period", "periods": ["2019-04-01"]}
    small = {"model": {"max_length": 16, "num_beams": 1}, "training": {"local_steps": 2}}
    recipe = FedTARRecipe(preset="tiny", num_rounds=1, time_steps=2, data=data, **small)
    recipe.export(str(place / "job"))
    folder = place / "ws" / "fedtar" / "server" / "simulate_job"
    shutil.copytree(place / "job" / "fedtar" / "app", folder / "app_server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTAR_HOME", str(place / "home"))
        patch.setenv("FEDTAR_SITES", str(place / "hospitals" / "sites"))
        return run_in_process(recipe, ["north", "south"], folder)


@pytest.fixture(scope="module")
def a_study(hospitals):
    return min(Path(hospitals["north"]["manifest"]).parent.glob("patients/*/*/ct"))


@pytest.fixture(scope="module")
def site_state(place, results):
    return place / "home" / "state" / read_adapter_info(results / "adapter")["run_id"] / "north"


def test_a_site_that_names_a_labeler_has_clinical_efficacy_by_it(results):
    scores = json.loads((results / "metrics.json").read_text())["final"]
    named = {site: [name for name in cells["all"] if name.startswith("radbert")] for site, cells in scores.items()}
    assert len(named["north"]) == 9 and not named["south"]
    assert "clinical efficacy by radbert" in (results / "report.html").read_text()


def test_report_makes_the_page_again_from_any_folder_around_the_run(results, place, tmp_path):
    (results / "report.html").unlink()
    assert json.loads(passing("report", place / "ws", "--json"))["status"] == "completed"
    assert (results / "report.html").is_file() and "BLEU-4" in passing("report", results)
    for text in ("", '{"event": "begin", "version": 0}\n'):
        (tmp_path / "rounds.jsonl").write_text(text)
        failing("report", tmp_path, code=1)


def test_generate_with_the_shared_adapter_alone(results, a_study, tmp_path):
    out = passing("generate", a_study, "--adapter", results / "adapter")
    assert out.startswith(f"*** {DISCLAIMER} ***") and "shared adapter alone" in out
    code, _, err = here("generate", a_study, "--adapter", results / "adapter", "--format", "json", "-o", tmp_path / "d")
    assert code == 0 and DISCLAIMER in err
    written = json.loads((tmp_path / "d").read_text())
    assert written["status"] == DISCLAIMER and written["personal_part"] is False and written["text"] in out


def test_generate_writes_a_structured_report_that_says_draft(results, a_study, tmp_path):
    passing("generate", a_study, "--adapter", results / "adapter", "--format", "sr", "-o", tmp_path / "sr")
    report, image = pydicom.dcmread(tmp_path / "sr"), pydicom.dcmread(sorted(a_study.iterdir())[0])
    assert report.Modality == "SR" and report.StudyInstanceUID == image.StudyInstanceUID
    assert report.PatientID == image.PatientID and report.SeriesDescription == DISCLAIMER
    flags = report.CompletionFlag, report.VerificationFlag, report.PreliminaryFlag
    assert flags == ("PARTIAL", "UNVERIFIED", "PRELIMINARY")
    texts = [item.TextValue for item in report.ContentSequence]
    assert texts[0].startswith(DISCLAIMER) and len(texts) == 2
    referenced = report.CurrentRequestedProcedureEvidenceSequence[0].ReferencedSeriesSequence[0]
    assert len(referenced.ReferencedSOPSequence) == len(list(a_study.iterdir()))


def test_generate_refuses_a_state_and_visits_that_are_not_the_adapter_s(results, site_state, a_study, tmp_path):
    assert "--time-step" in failing("generate", a_study, "--adapter", results / "adapter", "--state", site_state)
    other = tmp_path / "20200101-000000-aaaaaaaa" / "north"
    shutil.copytree(site_state, other)
    with_state = ("--adapter", results / "adapter", "--state", other, "--time-step", 1)
    assert "20200101-000000-aaaaaaaa" in failing("generate", a_study, *with_state)
    assert "there is no such file" in failing("generate", tmp_path / "gone", "--adapter", results / "adapter")
    for before in (("--prior-image", a_study), ("--prior-report", __file__, "--prior-days", 3)):
        said = failing("generate", a_study, "--adapter", results / "adapter", *before)
        assert f"data.prior=none, so its model cannot read the {before[0].removeprefix('--prior-')}" in said


def test_the_sites_own_page_of_examples_has_no_identity_and_stays_at_the_site(place, results, site_state, hospitals):
    page = (site_state / "examples.html").read_text()
    assert "has to stay there" in page and "Reference report" in page
    both = page + (site_state / "phi.html").read_text()
    assert all(patient.name not in both for patient in Path(hospitals["north"]["manifest"]).parent.glob("patients/*"))
    assert not (results / "examples").exists(), "a manifest's reports are treated as real ones"
    pictures = {picture.encode() for picture in re.findall(r'data:image/png;base64,([^"]+)', page)}
    assert pictures and results.is_relative_to(place / "ws")
    for path in (path for path in (place / "ws").rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert b"data:image/" not in content and not any(picture in content for picture in pictures), path


def test_the_examples_of_the_python_page_run(results, a_study, repository, tmp_path, monkeypatch):
    """In a folder with this run, which stands for the one that the page trains."""
    (tmp_path / "simulator_workspace").symlink_to(results.parents[3])
    (tmp_path / "chest_ct").symlink_to(a_study)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulation, "simulate", lambda recipe, sites, workspace: results)
    page = (repository / "docs" / "reference" / "python-api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    made = [runpy.run_path(str(write_text(tmp_path / f"{i}.py", block))) for i, block in enumerate(blocks)]
    assert made[0]["recipe"].name == "fedtar" and DISCLAIMER in (tmp_path / "draft.txt").read_text()
    assert any("lora_B" in name and value.any() for name, value in made[2]["model"].named_parameters())


def test_a_site_audits_what_the_adapter_remembers_and_its_vote_holds_the_release(
    place, results, site_state, hospitals, repository, tmp_path
):
    """``test_submission`` has a release that all agree to."""
    sites, kits = place / "hospitals" / "sites", provisioned(repository, tmp_path, ("north", "south"))
    home = {"FEDTAR_HOME": str(place / "home"), "FEDTAR_SITES": str(sites)}
    audit = ("site", "audit-model", results, "--simulated", "north")
    with (sites / "north.yaml").open("a") as file:
        file.write("policy: {max_membership_auc: 0.0}\n")
    code, out, err = here(*audit, "--json", **home)
    assert code == 1 and "Traceback" not in err, err  # above what the site's policy allows
    assert "it takes 10 of each" in failing(*audit, "--shadows", 2, code=1, **home)
    audited = json.loads(out)
    counts = audited["patients"]
    assert counts["training"]["all"] + counts["held_out"]["all"] == hospitals["north"]["patients"]
    assert [*audited["parts"]][:3] == ["warm start", "shared adapter", "with patient adapter"]
    assert all(0 <= part["membership_auc"] <= 1 for part in audited["parts"].values())
    assert json.loads((site_state / "model-audit.json").read_text())["parts"] == audited["parts"]
    vote = ("site", "vote", results, "yes", "--project", kits.project, "-o", results)
    assert here(*vote, "--simulated", "north", "--signs", kits.of / "north", **home)[0] == 1
    content = json.loads((results / "vote-north.json").read_text())["content"]
    values = [value for part in content["parts"].values() for value in part.values() if value is not None]
    assert values and all(value == round(round(value * 20) / 20, 2) for value in values)
    assert "longest" not in json.dumps(content) and content["held"] and content["yes"] and content["reasons"]
    assert "What it remembers" not in (results / "adapter" / "README.md").read_text()
    passing("report", results)
    card = (results / "adapter" / "README.md").read_text()
    assert "| north | shared adapter |" in card and "north asks to hold the release" in card
    refused = failing("release", results, "--project", kits.project, "--kit", kits.of / "lead@hub.org", code=1)
    assert "north is held" in refused and "no vote of south" in refused
    (results / "vote-north.json").unlink()
    nobody = ("site", "audit-model", results, "--simulated", "south")
    assert "known: none" in failing(*nobody, FEDTAR_HOME=str(place / "elsewhere"))


@pytest.mark.slow
def test_the_run_goes_on_with_the_next_period(place, results, repository, tmp_path):
    words = {"RESULTS": results, "WORKSPACE": tmp_path, "ROUNDS": 1}
    command = page_commands(repository / "docs" / "how-to" / "run-for-years.md", **words)["continue RESULTS"]
    sites = {"FEDTAR_HOME": str(place / "home"), "FEDTAR_SITES": str(place / "hospitals" / "sites")}
    code, out, err = fedtar(*command, "--from", "2019-07-01", "--json", **sites)
    assert code == 0, err[-3000:]
    after = read_run(json.loads(out.splitlines()[-1])["results"])
    assert [(step.round, step.step) for step in after.steps] == [(2, 1), (2, 2), (2, 3)]
    assert {site for step in after.steps for site in step.sites} == {"north", "south"}
    assert list(after.ahead) == [3] and after.start.run_id == read_run(results).start.run_id


def test_warmstart_on_a_site_s_studies_gives_weights_that_a_job_takes(hospitals, place, tmp_path):
    out = tmp_path / "start"
    start = ("warmstart", "--site-file", place / "hospitals" / "sites" / "south.yaml", "--job-seed", 3)
    start += ("--preset", "tiny", "-o", out)
    code, printed, err = here(*start, "--steps", 3, "--json", FEDTAR_HOME=str(place / "home"))
    assert code == 0, err
    about = json.loads(printed)
    assert about["training_studies"] > about["validation_studies"] and "step 3/3" in err
    passing("export", "--describe", "--preset", "tiny", "--set", f"model.weights={out / 'model.safetensors'}")
    assert "is there already" in failing(*start, FEDTAR_HOME=str(place / "home"))


def test_settings_from_a_file(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("preset: tiny\nnum_rounds: 4\ntraining: {local_steps: 7}\n")
    own = ("--set", "data.transforms=[{name: GaussianSmoothd, sigma: 1}]")
    assert 'preparation {"name": "GaussianSmoothd", "sigma": 1}' in passing("export", "--describe", *own)
    out = passing("export", "--describe", "--json", "--settings", file, "--set", "training.lr=5e-4")
    assert "work: 4 rounds" in json.loads(out)["asks"]
    passing("export", "--settings", file, "--set", "training.lr=5e-4", "-o", tmp_path)
    (entry,) = json.loads((tmp_path / "fedtar" / "app" / "config" / "config_fed_client.json").read_text())["executors"]
    assert entry["executor"]["args"]["settings"]["training"] == {"local_steps": 7, "lr": 5e-4}
