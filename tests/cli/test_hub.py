"""Adapters go to a hub and come from it: one of the test's own on this machine, that speaks as the real one does."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from command import failing, fedtar, run

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.learning.drafting import Drafter
from fedtar_flare.models.adapters.hub import FILES, adapter_folder
from fedtar_flare.models.adapters.peft_file import write_adapter

SHA, ID = "0123456789abcdef0123456789abcdef01234567", "clinic/adapter"


class Hub(BaseHTTPRequestHandler):
    """What the requests of ``huggingface_hub`` need to upload and fetch a model's files."""

    files: ClassVar[dict[str, bytes]] = {}
    private: ClassVar[list[bool]] = []

    def log_message(self, *_):
        """Say nothing."""

    def body(self):
        return self.rfile.read(int(self.headers["Content-Length"]))

    def say(self, data, **headers):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(200)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.split("?")[0]
        if "/resolve/" in path:
            name = path.rsplit("/", 1)[1]
            return self.say(self.files[name], ETag=f'"{hash(self.files[name])}"', X_Repo_Commit=SHA)
        if "/tree/" in path:
            return self.say([{"type": "file", "path": n, "size": len(c), "oid": SHA} for n, c in self.files.items()])
        if not self.private:
            return self.send_error(404)
        siblings = [{"rfilename": name} for name in self.files]
        self.say({"id": ID, "modelId": ID, "sha": SHA, "private": self.private[0], "siblings": siblings, "tags": []})

    do_HEAD = do_GET

    def do_POST(self):
        body = self.body()
        if self.path.endswith("/repos/create"):
            asked = json.loads(body)
            self.private[:] = self.private or [asked.get("private", asked.get("visibility") == "private")]
            return self.say({"url": f"http://{self.headers['Host']}/{ID}", "id": ID})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.say({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.files[line["value"]["path"]]
            url = f"http://{self.headers['Host']}/{ID}/commit/{SHA}"
            return self.say({"success": True, "commitOid": SHA, "commitUrl": url, "hookOutput": ""})
        self.say({"errors": [], "warnings": []})


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub, and the environment of a program that uses it with a cache of its own."""
    monkeypatch.setattr(Hub, "files", {".gitattributes": b"", "extra.safetensors": b"of an earlier adapter"})
    monkeypatch.setattr(Hub, "private", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache")}
    yield {**where, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    server.shutdown()
    server.server_close()


@pytest.fixture
def adapter(tmp_path):
    """A run's adapter folder, as far as the hub is concerned."""
    factors = {"base_model.model.h.0.mlp.lora_A.weight": torch.zeros(2, 3)}
    write_adapter(tmp_path / "adapter", factors, {"peft_type": "LORA"}, {"model": {}, "fingerprint": "f"})
    (tmp_path / "adapter" / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    return tmp_path / "adapter"


def found(environment, name, online):
    """In a process of its own, as the library reads the environment when it is imported."""
    program = f"from fedtar_flare.models.adapters.hub import adapter_folder as a; print(a({name!r}, {online}))"
    code, out, err = run("python", "-c", program, timeout=600, **environment)
    return err if code else Path(out.strip())


def test_what_is_pushed_is_listed_and_comes_back_from_hub_and_cache(hub, adapter):
    files = {path.name: path.read_bytes() for path in adapter.iterdir()}
    code, out, err = fedtar("push", adapter, ID, "--no-patients", "--yes", **hub)
    assert code == 0 and f"/{ID}/commit/{SHA}" in out, out + err
    assert all(f"{name}, {len(content):,} bytes" in out for name, content in files.items())
    assert Hub.private == [True] and Hub.files == {".gitattributes": b"", **files}, "what was there is replaced"
    assert "or `hf download`" in found(hub, ID, False)
    for online, name in ((True, ID), (False, ID), (False, f"{ID}@{SHA}")):
        folder = found(hub, name, online)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files, "without .gitattributes"
    code, _, err = fedtar("push", adapter, ID, "--no-patients", "--yes", **hub | {"HF_HUB_OFFLINE": "1"})
    assert code == 1 and "not uploaded (" in err and "offline" in err and "Traceback" not in err


def test_nothing_is_pushed_unasked_unreleased_or_beside_a_sites_state(adapter, tmp_path):
    assert "--root" in failing("push", adapter, ID, "--yes")
    assert "it was not released" in failing("push", adapter, ID, "--yes", "--root", tmp_path / "rootCA.pem", code=1)
    (adapter / "release.json").write_text("{}")
    assert "name the root certificate" in failing("push", adapter, ID, "--yes", "--no-patients")
    (adapter / "patient-0001.safetensors").write_text("a patient part")
    assert "more than an adapter (patient-0001.safetensors)" in failing("push", adapter, ID, "--yes", "--no-patients")
    (adapter / "patient-0001.safetensors").unlink()
    (tmp_path / "reports.csv").write_text("a patient's report")
    (adapter / "README.md").unlink()
    (adapter / "README.md").symlink_to(tmp_path / "reports.csv")
    assert "README.md is no regular file" in failing("push", adapter, ID, "--yes", "--no-patients")
    assert "is no adapter folder" in failing("push", tmp_path, ID, "--yes", "--no-patients")


def test_a_folder_goes_before_an_id_and_what_is_neither_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clinic" / "adapter").mkdir(parents=True)
    assert adapter_folder(ID) == Path(ID) and adapter_folder("runs/a/adapter") == Path("runs/a/adapter")
    with pytest.raises(ConfigError, match="no such folder, and no adapter that the hub's cache here"):
        Drafter("clinic/none")
    assert {"phi.html", "examples.json"}.isdisjoint(FILES)
