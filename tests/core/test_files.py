"""Files that appear whole or not at all."""

import json
import os
from itertools import pairwise
from string import ascii_lowercase

import pytest
from command import fedtar_here
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.files import PRIVATE, parse_yaml, read_json, replacing, write_bytes, write_json, write_text
from fedtar_flare.site.site_file import read_site_file
from fedtar_flare.suite.file import read_suite


def test_a_file_takes_its_place_whole_and_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "a.json"
    with replacing(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
    assert path.read_text() == "one" and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("tw")
        raise RuntimeError
    assert path.read_text() == "one" and list(path.parent.iterdir()) == [path], "the earlier file and nothing else"


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


TWICE = (
    "policy: {approval: required, approval: none}",
    "policy:\n  approval: required\nsource: manifest\npolicy:\n  min_patients: 1",
    "exclude: a.txt\nexclude: b.txt",
    'a: [{b: 1, "b": 2}]',
)


def test_a_key_that_occurs_twice_is_refused_by_name(tmp_path):
    for text in TWICE:
        with pytest.raises(ConfigError, match=r"the file: .*line \d: '(approval|policy|exclude|b)' occurs twice"):
            parse_yaml(text, "the file")
    (tmp_path / "a.json").write_text('{"scopes": [{"methods": [], "methods": ["fedavg"]}]}')
    with pytest.raises(ConfigError, match="'methods'"):
        read_json(tmp_path / "a.json")


SCALARS = st.sampled_from(
    ["2020-13-45", "!!bool x", "!!timestamp x", "!!float ''", "9" * 5000, "*a", "&a b", "{a: b", "<<"]
)


@given(st.lists(SCALARS, max_size=4), st.sampled_from([1, 40, 100_000]), st.sampled_from("[{"))
def test_no_text_of_yaml_ends_in_anything_but_a_value_or_a_sentence(parts, depth, bracket):
    """A deep one ended the process, by a segmentation fault."""
    for text in ("\n".join(f"k{i}: {part}" for i, part in enumerate(parts)), "a: " + bracket * depth):
        try:
            parse_yaml(text, "the file")
        except ConfigError as error:
            assert str(error).startswith("the file: ")


BOMBS = (
    "\n".join(["a: &a [x, x, x]", *(f"{b}: &{b} [*{a}, *{a}, *{a}]" for a, b in pairwise(ascii_lowercase))]),
    "a: &a [*a]",
    "base: &base {approval: none}\npolicy:\n  <<: *base\n  min_patients: 5",
)


def test_aliases_are_refused_by_every_reader(tmp_path):
    """Aliases of aliases (a billion laughs), one within itself, one that brings in a policy."""
    for text in BOMBS:
        (file := tmp_path / "fedtar.yaml").write_text(text)
        for read in (read_site_file, read_suite):
            with pytest.raises(ConfigError, match=r"line \d: write out what '\*\w+' stands for"):
                read(file)
    code, _, printed = fedtar_here("simulate", "--settings", file)
    assert code == 2 and "write out what" in printed and "Traceback" not in printed


@given(st.text())
def test_what_another_machine_sent_makes_no_line_of_a_log(text):
    assert str(ExchangeError(text)).isprintable() and ExchangeError(text).public.isprintable()
