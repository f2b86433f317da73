"""A real Orthanc with DICOMweb on loopback."""

import json
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from federation_process import free_port, wait_for

PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")


@contextmanager
def orthanc(folder: Path):
    """The address of its own interface; DICOMweb is below ``/dicom-web``. Skips where it is not installed."""
    if not (program := shutil.which("Orthanc")) or not PLUGIN.exists():
        pytest.skip("Orthanc is not installed (Debian: orthanc, orthanc-dicomweb)")
    pytest.importorskip("dicomweb_client", reason="of the extra 'pacs'")
    folder.mkdir(parents=True)
    port, place = free_port(), {"StorageDirectory": str(folder), "IndexDirectory": str(folder)}
    server = {"HttpPort": port, "DicomServerEnabled": False, "RemoteAccessAllowed": False, "Plugins": [str(PLUGIN)]}
    (folder / "orthanc.json").write_text(json.dumps(place | server))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, folder / "orthanc.json"], stdout=log, stderr=log)
    try:
        wait_for("Orthanc", lambda: _answers(f"http://127.0.0.1:{port}/system"))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def rest(url: str, content: bytes | None = None):
    """What its own interface answers: this, and not DICOMweb, fills the PACS and looks into it."""
    with urlopen(url, content, timeout=60) as answer:
        return json.load(answer)


def _answers(url: str) -> bool:
    with suppress(URLError):
        return bool(rest(url))
    return False
