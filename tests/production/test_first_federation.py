"""A first federation as the documents have it: the trial word for word, and three hospitals one at a time."""

import re
import uuid
from pathlib import Path

import pytest
import yaml
from command import fedtar_here, passing, run
from federation_process import MARK, Federation, end_marked, free_port, wait_for

from fedtar_flare.reporting.run import read_run

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]
TRIAL = Path("provisioning", "project-localhost.yml")
WAIT = "nvflare job wait $(grep -oE '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}' submitted) --startup-kit lead@hub.org"


def test_the_trial_on_one_machine_runs_as_it_is_written(repository, tmp_path, home):
    page = (repository / "provisioning" / "README.md").read_text().partition("## A trial on one machine")[2]
    script = "\n".join(re.findall(r"```\n(.*?)```", page.partition("\n## ")[0], re.DOTALL))
    script = re.sub(r"(nvflare job submit .*)", r"\1 | tee submitted", script)
    script = re.sub(r"(nvflare system shutdown .*)", rf"{WAIT}\n\1", script)
    assert script.count("submitted") == 2
    (tmp_path / TRIAL).parent.mkdir()
    (tmp_path / TRIAL).write_text((repository / TRIAL).read_text().replace("8002", str(free_port())))
    (tmp_path / "home").mkdir()
    environment = {"HOME": str(tmp_path / "home"), "FEDTAR_HOME": str(home), MARK: (mark := uuid.uuid4().hex)}
    (tmp_path / "trial.sh").write_text(f"set -e\n{script}")
    try:
        code, out, err = run("/bin/bash", tmp_path / "trial.sh", timeout=1500, cwd=tmp_path, **environment)
        assert code == 0, out + err
    finally:
        end_marked(mark)
    kits = tmp_path / "workspace" / "fedtar_trial" / "prod_00"
    for site in ("hospital-a", "hospital-b", "hospital-c"):
        assert [*(kits / f"{site}.fedtar_state").glob(f"*/{site}/*.safetensors")], out


def test_three_hospitals_come_one_at_a_time_to_a_running_server(repository, tmp_path, home, exported):
    everyone = {one["name"]: one for one in yaml.safe_load((repository / TRIAL).read_text())["participants"]}
    hub = Federation(tmp_path / "hub", home, {"hospital-a": "source: synthetic\n"})
    with hub.running() as federation:
        server, project = federation.site_processes("localhost"), federation.folder / "project.yml"
        for number, name in enumerate(("hospital-b", "hospital-c"), start=1):
            content = yaml.safe_load(project.read_text())
            content["participants"].append(everyone[name])
            project.write_text(yaml.safe_dump(content, sort_keys=False))
            federation.provision()
            kit = federation.sites[name] = federation.kits / name
            (federation.kits.parent / f"prod_{number:02}" / name).rename(kit)
            (kit / "local" / "fedtar.yaml").write_text("source: synthetic\n")
            assert "0 failed" in passing("doctor", "--kit", kit)
            federation.start(name)
            wait_for(f"{name} is ready", lambda kit=kit: fedtar_here("health", "--kit", kit)[0] == 0)
        job = exported(rounds=2, min_sites=3, temporal={"replay": "tested"}, data={"synthetic_patients": 24})
        record = read_run(federation.completed(federation.submit(job)))
        assert {*server} <= {*federation.site_processes("localhost")}, "it was not started again"
        assert sorted(record.start.sites) == sorted(federation.sites)
        first, second = (sum(site.samples for site in step.sites.values()) for step in record.steps[::2])
        assert first < second, "three sent T numbers, and no step was harmful: then all learn from all visits"
        for kit in federation.sites.values():
            assert "0 refused, 0 errors" in passing("audit", "--kit", kit)
