"""``fedtar data prepare``: what it leaves is what a job's handshake looks up."""

import errno
import json
import os
import resource
from unittest.mock import Mock

import pytest
from command import passing
from kits import make_kit, write_radiographs

from fedtar_flare.cli.main import main
from fedtar_flare.imaging import pipeline
from fedtar_flare.testing import Hospital


@pytest.fixture
def sites(tmp_path, monkeypatch, own_home):
    """Folder of site files with one hospital: five radiographs, one of which is no image."""
    monkeypatch.setenv("FEDTAR_SITES", str(tmp_path))
    write_radiographs(tmp_path, 5)
    (tmp_path / "3.png").write_bytes(b"no image")
    (tmp_path / "hospital.yaml").write_text("source: manifest\npath: manifest.csv\ncache_dir: cache\n")
    return tmp_path


def handshake(sites):
    """The hospital after a job's handshake, and its answer."""
    hospital = Hospital(sites, name="hospital", fresh=False, model={"slices": 1}, data={})
    return hospital, hospital.handshake()[0]


def prepare(*more):
    return json.loads(passing("data", "prepare", *more, "--preset", "tiny", "--set", "model.slices=1", "--json"))


def test_the_handshake_computes_nothing_and_a_bad_study_is_counted(sites, monkeypatch):
    counts = prepare("--site-file", sites / "hospital.yaml")
    (reason,) = counts["left_out"]
    assert counts["prepared"] == 4 and counts["there"] == 0 and counts["left_out"][reason] == 1

    monkeypatch.setattr(pipeline, "_compute", lambda *_: pytest.fail("an image is computed at the handshake"))
    cohort = handshake(sites)[0].executor.strategy.learner.cohort
    assert len(cohort.visits) == 4 and cohort.rejected == {reason: 1}
    assert not list(sites.rglob("*.key"))


def test_a_kit_is_prepared_once(sites):
    kit = make_kit(sites / "kit", "source: manifest\npath: ../../manifest.csv\n")
    assert prepare("--kit", kit)["prepared"] == 4
    again = prepare("--kit", kit)
    assert again["prepared"] == 0 and again["there"] == 4 and sum(again["left_out"].values()) == 1


@pytest.fixture
def limited():
    """No process that is started from here on can write a file of more than 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_full_disk_stops_the_work_instead_of_leaving_studies_out(sites, capfd, caplog, monkeypatch, limited, workers):
    for name in ("SERIAL_SECONDS", "WORTH_SECONDS"):
        monkeypatch.setattr(f"fedtar_flare.imaging.workers.{name}", -1.0)
    (sites / "0.png").write_bytes(b"no image")  # done in this process; the others, if it may be, in others
    options = ["--workers", workers, "--preset", "tiny", "--set", "model.slices=1", "--set", "model.image_size=256"]
    assert main(["data", "prepare", "--site-file", str(sites / "hospital.yaml"), *options]) == 1
    out, err = capfd.readouterr()
    assert "prepared images cannot be written" in err and "purge --cache" in err
    assert "Traceback" not in caplog.text + out + err and "left out" not in out
    whole = [path for path in (sites / "cache").rglob("*.*") if not path.name.startswith(".")]  # an ended worker's: not
    assert {path.suffix for path in whole} == {".json"}, "the refusal of the first study"


@pytest.mark.parametrize("full", [True, False])
def test_a_job_trains_on_nothing_where_images_cannot_be_kept(sites, monkeypatch, full):
    if full:
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr("fedtar_flare.imaging.cache.write_bytes", Mock(side_effect=error))
    else:
        (sites / "cache").write_text("a file in its place")
    reply = handshake(sites)[1]
    assert reply.status == "error" and str(sites) not in reply.reason
    assert ("disk is full" in reply.reason) is full
