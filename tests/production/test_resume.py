"""Resume without a federation: the job that is submitted, and the checkpoints that it finds."""

import json
import shutil
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from command import failing
from kits import provisioned
from nvflare.apis.fl_constant import FLContextKey
from nvflare.lighter.utils import load_private_key_file, sign_folders
from tables import edit_json

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.methods.fedtar.controller import TemporalResidualController
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.provision import resume as provision_resume
from fedtar_flare.provision.resume import _day_after, add_period, continued_recipe, resume, resumed_job
from fedtar_flare.provision.status import wait_for_sites
from fedtar_flare.runtime.checkpoint import CheckpointFolder
from fedtar_flare.testing import FunctionFederation, QuadraticSite, same_bits
from fedtar_flare.testing import last_checkpoint as last
from fedtar_flare.testing import random_pair as pair


def local(root, job, submitter="lead@hub.org", **settings):
    """The controller as the server's job process of this job runs it: its run folder is ``<kit>/<job id>``."""
    sites = {name: QuadraticSite(name, [pair(i), pair(i + 9)], validation=pair(7)) for i, name in enumerate("ab")}
    federation = FunctionFederation(root / job, sites, **({"num_rounds": 3, "time_steps": 2} | settings))
    federation.fl_ctx.set_prop(FLContextKey.CURRENT_RUN, job)
    (root / job).mkdir(parents=True, exist_ok=True)
    (root / job / "meta.json").write_text(json.dumps({"submitter_name": submitter}))
    return federation


@pytest.mark.parametrize(("best_is_written", "periods_before"), [(True, 2), (False, 1)])
def test_a_run_goes_on_by_its_job_s_id_and_again_where_that_dies_at_once(tmp_path, best_is_written, periods_before):
    """Though the run folder is gone, and also one that a period was added to."""
    first = local(tmp_path, "job-1", num_rounds=2, time_steps=periods_before)
    first.run()
    (tmp_path / "job-1").rename(tmp_path / "taken-away")
    if not best_is_written:
        assert first.results.best == 2
        for file in tmp_path.rglob("best.safetensors"):
            file.unlink()
    second = local(tmp_path, "job-2", resume_from="job-1")
    second.train = Mock(side_effect=KeyboardInterrupt)  # as if it were killed there
    with pytest.raises(KeyboardInterrupt):
        second.run()
    checkpoint = CheckpointFolder(tmp_path / "fedtar_checkpoints" / "job-2").last()[0]
    assert checkpoint.round == 2 and checkpoint.info["run_id"] == first.run_id
    assert (second.results_folder / "adapter" / "adapter_model.safetensors").is_file()
    third, whole = local(tmp_path, "job-3", resume_from="job-2"), local(tmp_path, "job-4", resume_from="job-1")
    third.run()
    whole.run()
    assert not third.panics and third.first_round == 3 and same_bits(last(third), last(whole))
    quiet = local(tmp_path / "quiet", "simulate_job", time_steps=periods_before)
    quiet.run()
    assert sorted(path.name for path in (tmp_path / "quiet").iterdir()) == ["simulate_job"], "and nothing beside it"
    assert periods_before == 1 or same_bits(last(third), last(quiet))


def failure(federation):
    federation.run()
    (reason,) = federation.panics
    return reason


def test_another_lead_s_weights_cannot_be_had_and_not_even_known_of(tmp_path):
    local(tmp_path, "job-1", num_rounds=1).run()
    for file in (tmp_path / "fedtar_checkpoints" / "job-1").glob("round-*"):
        file.write_bytes(b"damaged")  # must not show either
    local(tmp_path, "job-2", num_rounds=1).run()
    (tmp_path / "fedtar_checkpoints" / "job-3").mkdir()  # of an earlier release: it does not say whose it is
    said = set()
    for number, wanted in enumerate(["job-1", "job-2", "job-3", "job-4"]):
        reason = failure(local(tmp_path, f"theft-{number}", "another@hub.org", resume_from=wanted))
        said.add(reason.replace(wanted, "JOB"))
    assert len(said) == 1 and "somebody else's" in said.pop()
    kept = sorted(path.name for path in (tmp_path / "fedtar_checkpoints").iterdir())
    assert kept == ["job-1", "job-2", "job-3"]  # nothing was carried over


PATHS = ["{root}/job-1/fedtar/checkpoint", "../fedtar_checkpoints/job-1", "job-1/../job-1", "/etc/passwd", ".", "~"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("setting", ["resume_from", "initial_checkpoint"])
def test_a_job_names_no_path_at_the_server_though_the_files_are_its_own(tmp_path, setting, path):
    local(tmp_path, "job-1", num_rounds=1).run()
    for ending in ("", "/round-0001.safetensors") if setting == "initial_checkpoint" else ("",):
        wanted = path.format(root=tmp_path) + ending
        reason = failure(local(tmp_path, f"job-{len(ending)}x", **{setting: wanted}))
        assert "no checkpoint of job" in reason or "no initial weights of the name" in reason
        assert "No such file" not in reason and "damaged" not in reason


def test_weights_that_the_server_s_operator_offers_are_found_by_name(tmp_path):
    first = local(tmp_path, "job-1", num_rounds=1)
    first.run()
    (tmp_path / "fedtar_initial").mkdir()
    offered = tmp_path / "fedtar_initial" / "phantoms.safetensors"
    (tmp_path / "fedtar_checkpoints" / "job-1" / "round-0001.safetensors").rename(offered)
    second = local(tmp_path, "job-2", "another@hub.org", num_rounds=1, initial_checkpoint="phantoms")
    second.run()
    assert not second.panics
    start = second.local_sites["a"].received[1, 0]
    assert all(torch.equal(start[name], value) for name, value in last(first).weights.items())


def exported(folder, **settings):
    FedTARRecipe(name="job", preset="tiny", **settings).export(str(folder), byoc=False)
    return folder / "job"


def test_the_resuming_job_is_the_same_job_but_for_what_it_starts_from(tmp_path):
    job = exported(tmp_path, num_rounds=4, server={"initial_checkpoint": "start.safetensors"})
    before = {path: path.read_text() for path in job.rglob("*.json")}
    resumed_job(job, "job-1", rounds=6, min_sites=2)
    changed = [path.name for path, text in before.items() if path.read_text() != text]
    assert sorted(changed) == ["config_fed_server.json", "meta.json"]
    assert json.loads((job / "meta.json").read_text())["min_clients"] == 2
    (workflow,) = json.loads((job / "app" / "config" / "config_fed_server.json").read_text())["workflows"]
    assert workflow["args"] == {"method": "fedtar", "num_rounds": 6, "resume_from": "job-1", "min_sites": 2}
    assert TemporalResidualController(**workflow["args"]).resume_from == "job-1"


def test_a_resume_waits_for_the_run_s_sites_and_names_those_that_do_not_come():
    clients = [SimpleNamespace(name=name) for name in ("a", "x")]
    session = SimpleNamespace(get_system_info=lambda: SimpleNamespace(client_info=clients))
    for sites, min_sites in ((["a"], None), (["a", "b"], 1), ([], None)):
        wait_for_sites(session, sites, min_sites, seconds=0)
    for sites, min_sites in ((["a", "b"], None), (["a", "b"], 2), (["b"], 1)):
        with pytest.raises(FedTARError, match=r": b; .*--min-sites"):
            wait_for_sites(session, sites, min_sites, seconds=0)


def test_fewer_rounds_and_foreign_jobs_and_kits_are_refused(tmp_path):
    exported(tmp_path, num_rounds=4)
    (tmp_path / "foreign").mkdir()
    foreign = "no job of fedtar_flare"
    wrong = ("job", {"rounds": 2}, "at least"), ("job", {"min_sites": 0}, "at least 1"), ("foreign", {}, foreign)
    for job, settings, words in wrong:
        with pytest.raises(ConfigError, match=words):
            resumed_job(tmp_path / job, "job-1", **settings)
    for command in (["status"], ["watch", "x"], ["resume", "x"]):
        assert str(tmp_path) in failing(*command, "--kit", tmp_path)
    assert "--force needs --job" in failing("resume", "x", "--kit", tmp_path, "--force")


def test_a_server_s_copy_that_its_user_did_not_sign_is_not_signed(tmp_path, repository, monkeypatch):
    (tmp_path / "project").mkdir()
    kits, asked = provisioned(repository, tmp_path / "project").of, []
    lead = next(file.parents[1] for file in kits.glob("*/startup/fed_admin.json") if "lead" in str(file))
    exported(tmp_path, num_rounds=4)
    copy = shutil.copytree(tmp_path / "job", tmp_path / "result" / "job" / "job")

    @contextmanager
    def session(kit):
        answers = {"get_job_meta": {"status": "FINISHED:COMPLETED"}, "download_job_result": tmp_path / "result"}
        yield Mock(submit_job=asked.append, **{f"{name}.return_value": answer for name, answer in answers.items()})

    monkeypatch.setattr(provision_resume, "open_session", session)
    monkeypatch.setattr(provision_resume, "wait_for_sites", lambda *_: None)
    signing = lead / "startup"
    sign_folders(str(copy), load_private_key_file(str(signing / "client.key")), str(signing / "client.crt"))
    resume("job-1", lead)
    other = next(file.parents[1] for file in kits.glob("*/startup/fed_admin.json") if "lead" not in str(file))
    with pytest.raises(FedTARError, match="not as"):
        resume("job-1", other)
    (copy / "app" / "custom").mkdir()
    with pytest.raises(FedTARError, match="not as lead"):
        resume("job-1", lead)
    assert len(asked) == 1


PERIODS = {"data": {"alignment": "period", "periods": ["2019-04-01"]}, "time_steps": 2}


def test_a_run_goes_on_without_a_hospital_that_left_where_the_lead_says_so_and_with_it_when_it_is_back(tmp_path):
    local(tmp_path, "job-1", num_rounds=1, time_steps=1, min_sites=2).run()
    gone = local(tmp_path, "job-2", num_rounds=2, min_sites=2, resume_from="job-1")
    b = gone.local_sites.pop("b")
    assert "1 site(s) took part, min_sites is 2" in (reason := failure(gone)) and "--min-sites" in reason
    fewer = local(tmp_path, "job-3", num_rounds=2, resume_from="job-1")
    fewer.local_sites.pop("b")
    fewer.run()
    back = local(tmp_path, "job-4", num_rounds=3, resume_from="job-3")
    back.run()
    assert not fewer.panics + back.panics and not b.received
    assert [sorted(f.membership.sites) for f in (fewer, back)] == [["a"], ["a", "b"]]


@pytest.mark.parametrize("lasted", ["3:05:00.25", "N/A", "2 days, 3:55:00"])
def test_the_next_period_begins_on_the_day_after_the_job_ended(lasted):
    meta = {"submit_time_iso": None, "start_time": "2026-02-28T23:00:00+00:00", "duration": lasted}
    day = {"3": "2026-03-02", "N": "2026-03-01", "2": "2026-03-04"}[lasted[0]]
    assert _day_after(meta) == day
    with pytest.raises(ConfigError, match="has not come"):
        _day_after(meta | {"start_time": (datetime.now(UTC) + timedelta(days=1)).isoformat()})


def test_the_next_period_is_a_job_with_another_bound_and_more_rounds_and_no_other_change(tmp_path):
    job, whole = exported(tmp_path, num_rounds=4, **PERIODS), tmp_path / "whole"
    add_period(job, 2, "2019-07-01", "newest")
    data = {"replay_share": 0.0, "alignment": "period", "periods": ["2019-04-01", "2019-07-01"]}
    longer = {"data": data, "time_steps": 3}
    expected = exported(whole, num_rounds=6, **longer)
    for name in ("config_fed_server.json", "config_fed_client.json"):
        one, other = (json.loads((place / "app" / "config" / name).read_text()) for place in (job, expected))
        if name == "config_fed_server.json":
            assert one["workflows"][0]["args"].pop("time_steps", 3) == 3  # the default, which is not written
            other["workflows"][0]["args"].pop("time_steps", 3)
        assert one == other
    for wrong, reason in (("2019-07-02", "apart"), ("soon", "ISO")):
        with pytest.raises(ConfigError, match=reason):
            add_period(job, 1, wrong)
    with pytest.raises(ConfigError, match="visits, not periods"):
        add_period(exported(tmp_path / "by-visit"), 1, "2019-07-01")


@pytest.mark.parametrize("begins", [None, "2019-07-01"])
def test_a_simulation_goes_on_with_the_settings_that_it_had(tmp_path, begins, monkeypatch):
    said = PERIODS | {"num_rounds": 4, "min_sites": 1, "seed": 3}
    said |= {"server": {"eta": 0.5}, "training": {"local_steps": 7}}
    results = tmp_path / "job" / "server" / "simulate_job" / "fedtar"
    shutil.copytree(exported(tmp_path / "export", **said) / "app", results.parent / "app_server")
    mlflow = {"id": "mlflow", "path": "MLflowRuns", "args": {"tracking_uri": "http://there"}}
    config = results.parent / "app_server" / "config" / "config_fed_server.json"
    edit_json(config, lambda content: content["components"].append(mlflow))
    curves = []
    monkeypatch.setattr("fedtar_flare.runtime.recipe.add_tracking", lambda _, uri: curves.append(uri))
    recipe = continued_recipe(results, 2, begins, begins and "all")
    assert curves == ["http://there"]
    if begins:
        said |= {"time_steps": 3, "data": PERIODS["data"] | {"periods": ["2019-04-01", begins], "replay_share": 1.0}}
    server = {"eta": 0.5, "resume_from": str(results / "checkpoint")}
    expected = FedTARRecipe(name="job", preset="tiny", **said | {"num_rounds": 6, "server": server})
    assert recipe.name == "job" and recipe.resolved() == expected.resolved()
