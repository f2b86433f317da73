"""Archives and folders from elsewhere write nothing outside the folder that they are unpacked into."""

import io
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from command import fedtar_here
from labelers import published
from nvflare.fuel.utils.zip_utils import unzip_all_from_bytes, unzip_single_file_from_bytes

import fedtar_flare
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.curation.unpack import unpack
from fedtar_flare.models.config import preset
from fedtar_flare.models.decoder import build_decoder
from fedtar_flare.models.vlm import processor_of

CLIMBING = ("../climbed", "../../climbed", "a/../../climbed", "/tmp/climbed", "..\\climbed")


def places(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_archives_are_unpacked_in_one_place_and_nothing_is_unpickled():
    """Whoever opens another one adds it here, with a test of what its names can do. Images of a zip stay in memory."""
    package = Path(fedtar_flare.__file__).parent
    texts = {str(file.relative_to(package)): file.read_text("utf-8") for file in package.rglob("*.py")}
    opened = re.compile(r"tarfile|unpack_archive|extractall|\.extract\(")
    assert {name for name, text in texts.items() if opened.search(text)} == {"curation/unpack.py"}
    unpickled = re.compile(r"pickle\.load|allow_pickle|weights_only=False")  # all else that runs a file, ruff refuses
    assert not [name for name, text in texts.items() if unpickled.search(text)]
    assert any("torch.load(" in text for text in texts.values())


def test_a_packed_data_set_leaves_its_pictures_alone(tmp_path):
    arrays = {"train_images": np.zeros((2, 28, 28), np.uint8), "train_labels": np.array([[0], [1]], np.uint8)}
    np.savez(tmp_path / "x.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        for name in CLIMBING:
            archive.writestr(name, b"x")
    unpack(tmp_path / "x.npz", tmp_path / "a" / "b" / "out")
    pictures = {f"a/b/out/pictures/train-00000{i}.png" for i in (0, 1)}
    assert places(tmp_path) == {"x.npz", "a", "a/b", "a/b/out", "a/b/out/pictures", "a/b/out/manifest.csv", *pictures}
    assert not Path("/tmp/climbed").exists()


def test_a_labeler_s_checkpoint_and_tokenizer_write_into_its_folder_alone(tmp_path):
    file, *_ = published(tmp_path / "hub", "radbert")
    with zipfile.ZipFile(file, "a") as archive:  # torch's files are zips, whose members lie in one folder
        for name in CLIMBING:
            archive.writestr(f"radbert/{name}", b"x")
    settings = file.parent / "tokenizer_config.json"
    content = json.loads(settings.read_text()) if settings.exists() else {}
    templates = [{"name": name, "template": "x"} for name in ("default", *CLIMBING)]
    settings.write_text(json.dumps(content | {"chat_template": templates}))
    before = places(tmp_path)
    code, _, err = fedtar_here("labeler", "import", file, "-o", tmp_path / "out" / "labeler")
    assert code == 0, err
    new = places(tmp_path) - before - {"out", "out/labeler"}
    assert "out/labeler/labeler.json" in new and not any("/" in name.removeprefix("out/labeler/") for name in new)
    assert not [name for name in new if "climbed" in name or name.endswith(".jinja")]


def built(name):
    return build_decoder(preset("tiny", decoder="prefix", decoder_name=name), 9, True)


@pytest.mark.parametrize("build", [built, processor_of])
def test_code_in_a_model_s_folder_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch, build):
    """transformers asked whoever sits at the terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody is asked to run code"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoProcessor", "AutoTokenizer")
    content = json.dumps({"model_type": "foreign", "auto_map": dict.fromkeys(names, "code.Any")})
    for name in ("config.json", "processor_config.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(content)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Any: pass\n")
    with pytest.raises(ConfigError):
        build(str(tmp_path))
    assert not (tmp_path / "run").exists()


CHANGED = ['{"text": "a"', "5", "[]", '{"text": "a", "reference": "b"}', '{"text": 5, "personal": true}']
CHANGED += ['{"text": "a", "reference": "b", "personal": true, "visit_id": "c"}']


@pytest.mark.parametrize("text", CHANGED)
def test_kept_reports_that_were_changed_are_no_traceback(tmp_path, text):
    (tmp_path / "report-scores-0001.jsonl").write_text(text)
    code, _, err = fedtar_here("score", tmp_path, "--labeler", "chexpert-rules")
    where = f"{tmp_path / 'report-scores-0001.jsonl'}, line 1:"
    assert code == 2 and where in err and "Traceback" not in err


@pytest.mark.parametrize("name", [*CLIMBING, "job/link"])
def test_a_job_s_archive_is_refused_by_flare_whose_release_this_package_holds(name, tmp_path):
    """Both ways by which a server and a site open jobs; another release of FLARE has to pass this first."""
    packed, member = io.BytesIO(), zipfile.ZipInfo(name)
    member.external_attr = 0o120777 << 16 if name.endswith("link") else 0
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("job/meta.json", "{}")
        archive.writestr(member, "/etc")
    (place := tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(ValueError, match="unsafe"):
        unzip_all_from_bytes(packed.getvalue(), str(place))
    with pytest.raises(ValueError, match="unsafe"):
        unzip_single_file_from_bytes(packed.getvalue(), str(place), name)
    assert places(tmp_path) - {"a/b/job"} == {"a", "a/b"}
