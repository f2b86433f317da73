"""The documentation site's versions: what tools/publish_site.sh pushes."""

import json
import subprocess

import pytest


@pytest.fixture
def publish(repository, tmp_path):
    """Publish a page under a version, from a clone of an empty repository."""
    work = tmp_path / "work"
    subprocess.run(["git", "init", "-q", "--bare", tmp_path / "origin"], check=True)
    subprocess.run(["git", "clone", "-q", tmp_path / "origin", work], check=True, capture_output=True)
    (work / "tools").mkdir()
    script = work / "tools" / "publish_site.sh"
    script.write_bytes((repository / "tools" / "publish_site.sh").read_bytes())

    def run(version, page):
        site = tmp_path / "site" / page
        site.mkdir(parents=True, exist_ok=True)
        (site / f"{page}.html").touch()
        return subprocess.run(["bash", script, site, version], capture_output=True, text=True)

    return run


def published(origin, name):
    """A file of the branch, or the names in a folder of it."""
    shown = subprocess.run(["git", "show", f"gh-pages:{name}"], cwd=origin, check=True, capture_output=True, text=True)
    return shown.stdout


def test_each_version_keeps_its_pages_and_the_start_page_leads_to_the_newest_release(publish, tmp_path):
    newest = []
    for version, page in (("dev", "a"), ("1.9", "b"), ("1.10", "c"), ("1.9", "d"), ("dev", "a")):
        answer = publish(version, page)
        assert answer.returncode == 0, answer.stderr
        versions = json.loads(published(tmp_path / "origin", "versions.json"))
        (latest,) = (entry["version"] for entry in versions if entry["aliases"] == ["latest"])
        assert f"url={latest}/'" in published(tmp_path / "origin", "index.html")
        newest.append(latest)
    assert newest == ["dev", "1.9", "1.10", "1.10", "1.10"]
    assert [entry["version"] for entry in versions] == ["dev", "1.10", "1.9"]
    pages = {name: published(tmp_path / "origin", f"{name}/").split()[-1] for name in ("dev", "1.10", "1.9")}
    assert pages == {"dev": "a.html", "1.10": "c.html", "1.9": "d.html"}


def test_of_two_publications_at_once_neither_is_lost(publish, tmp_path):
    work = tmp_path / "work"
    hook, raced, script = work / ".git/hooks/pre-push", work / "raced", work / "tools/publish_site.sh"
    first = f"touch {raced}; unset $(git rev-parse --local-env-vars); bash {script} {tmp_path}/site/a 1.0"
    hook.write_text(f"#!/bin/sh\n[ -e {raced} ] || ({first})\n")
    hook.chmod(0o700)
    answer = publish("dev", "a")
    assert answer.returncode == 0 and raced.exists(), answer.stderr
    assert published(tmp_path / "origin", "dev/").split()[-1] == published(tmp_path / "origin", "1.0/").split()[-1]
    hook.write_text("#!/bin/sh\nexit 1\n")
    answer = publish("1.1", "a")
    assert answer.returncode == 1 and "'1.1' is not published: git refused the push 5 times" in answer.stderr


def test_a_name_that_is_no_version_is_refused(publish, tmp_path):
    for name in ("v1.2.3", "main", "../1.2", ""):
        answer = publish(name, "a")
        assert answer.returncode == 1 and "is no version of the site; give X.Y or dev" in answer.stderr
