"""From a job over mTLS to a released adapter: hospitals audit and vote with their own kits, and the lead releases."""

import json

import pytest
from command import failing, passing
from federation_process import SITES

from fedtar_flare.site.context import state_of
from fedtar_flare.site.release import verify_release

pytestmark = pytest.mark.production


def test_an_adapter_leaves_a_federation_with_the_votes_of_its_hospitals(federation, exported):
    results = federation.completed(federation.submit(exported("released")))
    project = ("--project", federation.folder / "project.yml")
    home = {"FEDTAR_HOME": federation.environment["FEDTAR_HOME"]}
    release = ("release", results, *project, "--kit", federation.kits / "lead@hub.org")
    for name, kit in federation.sites.items():
        assert f"no vote of {name}" in failing(*release, code=1)
        run_id = json.loads(passing("site", "audit-model", results, "--kit", kit, "--json", **home))["run_id"]
        assert json.loads((state_of(kit) / run_id / name / "run.json").read_text())["sites"] == list(SITES)
        passing("site", "vote", results, "yes", *project, "--kit", kit, "-o", results, **home)
    passing(*release)
    verify_release(results / "adapter", federation.server / "startup" / "rootCA.pem")
