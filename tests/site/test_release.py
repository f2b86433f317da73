"""The release of an adapter, with kits that FLARE made: who can bring one about, and what changes it."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from command import failing, fedtar_here, passing
from kits import provisioned, whole
from nvflare.lighter import utils as flare
from recorded_runs import RUN_ID, edit, write_run
from tables import cases

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import read_json, write_json, write_text
from fedtar_flare.models.adapters.peft_file import ADAPTER_WEIGHTS, adapter_hashes, write_adapter
from fedtar_flare.reporting.model_audit import PARTS, rounded
from fedtar_flare.reporting.run import read_run
from fedtar_flare.runtime import simulation
from fedtar_flare.site.audit import audit_files, read_audit, write
from fedtar_flare.site.context import Site, state_of
from fedtar_flare.site.model_audit import AUDIT
from fedtar_flare.site.release import MANIFEST, gates_beyond, read_project, release, verify_release
from fedtar_flare.site.signatures import sign, verify
from fedtar_flare.testing.hospital import Hospital

SITES, A = ["hospital-a", "hospital-b", "hospital-c"], "vote-hospital-a.json"
DRAFTS = {"own": 0.0, "other": 0.0, "unseen": 0.0, "longest_own": 9, "longest_other": 0, "longest_unseen": 0}
FIGURES = {"membership_auc": 0.55, "standard_error": 0.05, "loss_auc": 0.5, "loss_error": 0.05, "rare_auc": None}
FIGURES |= {"training": DRAFTS, "held_out": DRAFTS}
COUNTS = {"training": {"all": 43, "rare": 3}, "held_out": {"all": 21, "rare": 2}}
"""Figures of an audit that found nothing."""


@pytest.fixture(scope="module")
def kits(repository, tmp_path_factory):
    made = provisioned(repository, tmp_path_factory.mktemp("project"))
    for site in SITES:
        write_text(made.of / site / "local" / "fedtar.yaml", whole("source: synthetic\n"))
    return made


def audited(kit, adapter, **figures):
    """Put an audit of these figures into a site's state of the run."""
    parts, state = {PARTS[0]: FIGURES, PARTS[1]: FIGURES | figures}, state_of(kit) / RUN_ID / kit.name
    about = {"time_steps": 3, "data": {}, "seed": 0, "sites": SITES}
    write_json(state / "run.json", about)
    details = {"site": kit.name, "run_id": RUN_ID, "round": 3, "patients": COUNTS, "parts": parts, "held": False}
    details |= {"least": 5, "rounded": rounded(parts, COUNTS, 5), "adapter": adapter_hashes(adapter)}
    write_json(state / AUDIT, details)
    return details


def cast(kits, site, run, answer="yes", project=None, code=0):
    arguments = ("site", "vote", run, answer, "--project", project or kits.project, "--kit", kits.of / site, "-o", run)
    assert fedtar_here(*arguments)[0] == code


@pytest.fixture(scope="module")
def voted(kits, tmp_path_factory):
    """A run's folder with an adapter and a vote of every site; copied by those who change it."""
    run = write_run(tmp_path_factory.mktemp("runs") / "run", sites=SITES, until="end")
    lora = {f"base_model.model.x.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    info = {"run_id": RUN_ID, "round": 3, "model": {"preset": "small"}, "fingerprint": "x"}
    write_adapter(run / "adapter", lora, {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["x"]}, info)
    for site in SITES:
        audited(kits.of / site, run / "adapter")
        cast(kits, site, run)
    return run


@pytest.fixture
def run(voted, tmp_path):
    return shutil.copytree(voted, tmp_path / "run")


@pytest.fixture(scope="module")
def released(kits, voted, tmp_path_factory):
    copy = shutil.copytree(voted, tmp_path_factory.mktemp("released") / "run")
    passing("release", copy, "--project", kits.project, "--kit", kits.of / "lead@hub.org")
    return copy


def test_with_a_vote_of_every_site_an_adapter_is_released_and_the_card_has_the_dossier(kits, released):
    verify_release(released / "adapter", kits.root)
    passing("report", released)  # which writes the same card again
    verify_release(released / "adapter", kits.root)
    card = (released / "adapter" / "README.md").read_text()
    assert all(f"| {site} | yes | held out 20, source synthetic, time steps 3, training 40 |" in card for site in SITES)
    assert r"max\_membership\_auc 0.6" in card and "| hospital-a | shared adapter | 0.55" in card
    entries = read_audit(audit_files(kits.of / "hospital-a"))
    assert [e["outcome"] for e in entries if e["task"] == "(release)"] == ["vote signed"]


def test_generate_takes_a_released_adapter_by_its_root_alone(kits, released, run, tmp_path):
    generate = ("generate", tmp_path, "--adapter")
    assert "--root" in failing(*generate, released / "adapter")
    assert "it was not released" in failing(*generate, run / "adapter", "--root", kits.root, code=1)
    (run / "adapter" / MANIFEST).write_bytes((released / "adapter" / MANIFEST).read_bytes())
    (run / "adapter" / "README.md").write_text("Cleared for clinical use.")
    assert "README.md" in failing(*generate, run / "adapter", "--root", kits.root, code=1)


def test_any_changed_byte_refuses(kits, released, tmp_path):
    adapter, drawn = shutil.copytree(released / "adapter", tmp_path / "adapter"), random.Random(0)
    for file in sorted(adapter.iterdir()):
        content = file.read_bytes()
        for at in [*range(3), len(content) - 1, *drawn.sample(range(len(content)), min(100, len(content)))]:
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << drawn.randrange(8)]) + content[at + 1 :])
            with pytest.raises(FedTARError):
                verify_release(adapter, kits.root)
        empty = b'{"certificate": 1, "content": [], "signature": 1}'
        for other in (content[:-1], content + b"\n", b"[" * 10**5, b"{}", empty):
            file.write_bytes(other)
            with pytest.raises(FedTARError):
                verify_release(adapter, kits.root)
        file.write_bytes(content)
    verify_release(adapter, kits.root)
    (adapter / "extra.safetensors").write_bytes(b"more")
    with pytest.raises(FedTARError, match="extra"):
        verify_release(adapter, kits.root)


def other(site="hospital-a", signer="hospital-a", **values):
    """Sign a site's vote anew, with other values."""

    def attack(kits, run):
        file = run / f"vote-{site}.json"
        file.write_bytes(sign(json.loads(file.read_text())["content"] | values, kits.of / signer))

    return attack


def of_other_root(kits, run):
    root, key = flare.Identity("fedtar_trial"), flare.generate_keys()
    kit = run / "kit" / "startup"
    certificate = flare.generate_cert(flare.Identity("hospital-a"), root, key[0], key[1])
    write_text(kit / "client.crt", flare.serialize_cert(certificate).decode())
    write_text(kit / "client.key", flare.serialize_pri_key(key[0]).decode())
    other(signer=run / "kit")(kits, run)


def swapped(kits, run):
    (file := run / "adapter" / ADAPTER_WEIGHTS).write_bytes(file.read_bytes()[:-4] + bytes(4))


def no_into_yes(kits, run):
    cast(kits, "hospital-b", run, "no")
    (file := run / "vote-hospital-b.json").write_text(file.read_text().replace('"yes": false', '"yes": true'))


ATTACKS = {
    "a vote is missing": lambda kits, run: (run / "vote-hospital-b.json").unlink(),
    "a site says no": lambda kits, run: cast(kits, "hospital-b", run, "no"),
    "the lead turns a no into a yes": no_into_yes,
    "the lead votes": other(signer="lead@hub.org"),
    "another site votes for it": other(signer="hospital-b"),
    "its vote is another site's": lambda kits, run: shutil.copy(run / "vote-hospital-b.json", run / A),
    "a certificate of another root": of_other_root,
    "a vote of another run": other(run_id="another"),
    "a vote of another round": other(round=2),
    "the adapter is swapped": swapped,
    "its settings are": lambda kits, run: write_json(run / "adapter" / "adapter_config.json", {"r": 2}),
    "a certificate that was not yet valid": other(time="2020-01-01"),
    "a gate holds it": other(reasons=["max_words"]),
    "a site learnt and is not named": lambda kits, run: edit(run, "start", sites=[*SITES, "hospital-d"]),
    "no vote but bytes": lambda kits, run: (run / A).write_bytes(b"\xff\x00"),
    "a field that is no text": other(version=["x"]),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_refuses_a_release(attack, kits, run):
    ATTACKS[attack](kits, run)
    with pytest.raises(FedTARError):
        release(read_run(run), read_project(kits.project), kits.of / "lead@hub.org")
    assert not (run / "adapter" / MANIFEST).exists()


def test_nobody_strips_a_site_or_a_gate_from_the_project_file(kits, run):
    """The sites know from FLARE who was in the run, and hold a project file that does not name everybody."""
    content = yaml.safe_load(kits.project.read_text())
    content["participants"] = [entry for entry in content["participants"] if entry["name"] != "hospital-c"]
    file = write_text(run / "project.yml", yaml.safe_dump(content))
    for site in SITES[:2]:
        cast(kits, site, run, project=file, code=1)
        assert "hospital-c" in str(json.loads((run / f"vote-{site}.json").read_text())["content"]["reasons"])
    for project in (file, kits.project):
        with pytest.raises(FedTARError):
            release(read_run(run), read_project(project), kits.of / "lead@hub.org")
    for site in SITES[:2]:
        cast(kits, site, run)
    loose = yaml.safe_load(kits.project.read_text()) | {"release": {"max_membership_auc": 1.0}}
    with pytest.raises(FedTARError, match="other sites or gates"):
        release(read_run(run), read_project(write_text(run / "p.yml", yaml.safe_dump(loose))), kits.of / "lead@hub.org")


@pytest.mark.parametrize("signer", ["hospital-a", "member@hospital-b.org", "it@hospital-a.org", "localhost"])
def test_only_a_lead_signs_a_manifest(kits, run, signer):
    with pytest.raises(FedTARError):
        release(read_run(run), read_project(kits.project), kits.of / signer)
    with pytest.raises(FedTARError):
        verify_release(run / "adapter", kits.root)


def test_a_vote_from_an_earlier_release_is_of_no_use_for_other_votes(kits, released, run):
    """A manifest whose votes are exchanged, left out or doubled is signed by the lead all the same."""
    content, _ = verify((released / "adapter" / MANIFEST).read_bytes(), kits.root, "it")
    adapter, votes = shutil.copytree(released / "adapter", run / "other"), content["votes"]
    for other in ({}, {"hospital-a": votes["hospital-a"]}, votes | {"x": votes["hospital-a"]}, None,
                  votes | {"hospital-a": votes["hospital-b"]}):  # fmt: skip
        (adapter / MANIFEST).write_bytes(sign(content | {"votes": other}, kits.of / "lead@hub.org"))
        with pytest.raises(FedTARError):
            verify_release(adapter, kits.root)
    (adapter / MANIFEST).write_bytes(sign(content, kits.of / "lead@hub.org"))
    verify_release(adapter, kits.root)


def test_a_site_that_had_no_part_votes_without_an_audit_and_one_whose_state_was_purged_does_not(kits, run, tmp_path):
    kit = shutil.copytree(kits.of / "hospital-a", tmp_path / "hospital-a")
    vote = ("site", "vote", run, "yes", "--project", kits.project, "--kit", kit, "-o", run)
    content = json.loads(passing(*vote, "--json"))
    assert content["data"] == {"took part": "no"} and not content["parts"] and not content["reasons"]
    entry = {"task": "train", "run": RUN_ID, "outcome": "passed", "tensors": [{"name": "x"}]}
    write(Site.outside_of_jobs(kit), "job", entry)
    assert "purged" in failing(*vote)


def test_a_site_votes_on_what_it_has_audited_alone(kits, run):
    swapped(kits, run)
    vote = ("site", "vote", run, "yes", "--project", kits.project, "--kit", kits.of / "hospital-a", "-o", run)
    assert "was not audited here as it is now" in failing(*vote)
    for content in ("name: x\n", "name: x\nparticipants: []\nrelease: {}\n", "name: x\nparticipants: 3\nrelease: {}\n"):
        with pytest.raises(ConfigError):
            read_project(write_text(run / "p.yml", content))


@pytest.mark.parametrize(("figures", "gates"), cases(__file__, "gates.yaml"))
def test_which_figures_are_beyond_which_gate(kits, tmp_path, figures, gates):
    figures = {name: DRAFTS | value if isinstance(value, dict) else value for name, value in figures.items()}
    details = {"parts": {PARTS[1]: FIGURES | figures}, "patients": COUNTS}
    project = read_project(kits.project)
    assert [reason.split()[0] for reason in gates_beyond(project, details, None)] == gates
    bounded = project.replace(max_epsilon=3.0)
    for epsilon, beyond in ((None, True), (3.1, True), (2.9, False)):
        assert ("max_epsilon" in [*gates_beyond(bounded, details, epsilon)]) is beyond


def test_a_site_notes_with_whom_a_job_was_started(home, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTAR_HOME", str(home))
    hospital = Hospital(tmp_path)
    for name in ("north", "south"):  # when the run is resumed
        clients = [SimpleNamespace(name=name)]
        monkeypatch.setattr(simulation._Engine, "get_clients", lambda _, these=clients: these, raising=False)
        hospital.handshake("noted")
    assert read_json(home / "state" / "noted" / "site-1" / "run.json")["sites"] == ["north", "south"]
