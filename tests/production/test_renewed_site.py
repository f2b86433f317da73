"""A site whose certificate was renewed logs in again at the running server, and the lead sees the new date."""

import json
import re

import pytest
from command import passing

from fedtar_flare.core.files import hashes

pytestmark = [pytest.mark.production, pytest.mark.timeout(1800)]


def end_of(federation, site):
    """When the site's certificate ends, as the lead is told."""
    gauges = federation.folder / "status.prom"
    passing("status", "--kit", federation.kits / "lead@hub.org", "--prometheus", gauges)
    (end,) = re.findall(rf'fedtar_certificate_end_seconds{{site="{site}"}} (\S+)', gauges.read_text())
    return float(end)


def test_a_renewed_site_is_taken_in_and_its_new_end_is_told(federation):
    site, kit = "hospital-b", federation.sites["hospital-b"]
    before, local = end_of(federation, site), hashes(kit / "local")
    file = federation.kits.parent / "state" / "cert.json"
    state = json.loads(file.read_text())
    del state[site]
    file.write_text(json.dumps(state))
    project, workspace = federation.folder / "project.yml", federation.kits.parents[1]
    done = federation.command("provision", "-p", project, "-w", workspace, "--force")
    assert done.returncode == 0, done.stdout + done.stderr
    passing("renew", federation.kits.parent / "prod_01" / site, "--kit", kit)
    assert hashes(kit / "local") == local and end_of(federation, site) == before, "it runs on with the one before"
    federation.kill_site(site)
    federation.start(site)
    assert end_of(federation, site) > before
