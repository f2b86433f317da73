"""Files that appear whole or not at all."""

import json
import os

import pytest

from fedtar_flare.files import PRIVATE, replacing, write_bytes, write_json, write_text


def test_a_file_takes_its_place_whole_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "a.json"
    with replacing(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one" and path.stat().st_mode & 0o777 == 0o600


def test_after_an_exception_the_earlier_file_stays_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("one")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("tw")
        raise RuntimeError
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "write", [write_json, write_text, lambda path, text, *mode: write_bytes(path, text.encode(), *mode)]
)
def test_a_file_has_the_permissions_of_the_users_files_unless_it_is_private(write, tmp_path):
    umask = os.umask(0o027)
    try:
        assert write(tmp_path / "a", "text").stat().st_mode & 0o777 == 0o640
        assert write(tmp_path / "b", "text", PRIVATE).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(umask)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


def test_json_holds_no_number_that_others_cannot_read(tmp_path):
    assert json.loads(write_json(tmp_path / "a.json", {1: (float("nan"), 2.5)}).read_text()) == {"1": [None, 2.5]}
