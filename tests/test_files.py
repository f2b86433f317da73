"""Files that appear whole or not at all."""

from __future__ import annotations

import pytest

from fedtar_flare.files import replacing


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
