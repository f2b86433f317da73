"""Draws that stay secret, files that appear whole or not at all, and settings that are refused by name."""

import json
import os
import re
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Literal

import numpy as np
import pytest
import torch
import yaml
from command import fedtar_here
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field
from scipy import stats
from tables import cases

import fedtar_flare
from fedtar_flare.core.draws import SECRET, derived_seed, orders, standard_normals, uniforms
from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.files import PRIVATE, parse_yaml, read_json, replacing, write_bytes, write_json, write_text
from fedtar_flare.core.settings import MAX_GLOBS, MAX_LENGTH, RunSettings, Settings, build, matches, problem_of
from fedtar_flare.core.text import Progress
from fedtar_flare.learning.config import DataConfig, LoRAConfig
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.models.config import preset
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.site.site_file import Bounds, read_site_file
from fedtar_flare.suite.file import read_suite

NEVER = 1e-9
"""Chance of a right distribution's draws, some of which are anew in each run, to be refused."""
PUBLIC_SEEDS = """core/draws.py learning/learner.py learning/diagnosis.py learning/comparison.py learning/canaries.py
methods/fedtar/patient_lora.py methods/fedtar/policy.py models/adapters/kinds.py models/adapters/lora.py
models/encoders.py models/classifier.py models/learned_prompts.py models/report_generator.py models/vlm.py
testing/federation.py"""
"""Files that seed torch, by a number that everybody knows: of initial weights, above all, which sites must share. Two
are of simulations: ``draws`` (its ``orders`` decides) and ``learner`` (of a DP-SGD that protects nobody).
"""


def test_no_other_file_seeds_torch():
    root = Path(fedtar_flare.__file__).parent
    seeds = re.compile(r"\.(manual_seed|seed_all)\b")
    files = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in root.rglob("*.py")}
    assert {name for name, text in files.items() if seeds.search(text)} == set(PUBLIC_SEEDS.split())


def test_seeds_that_share_their_low_64_bits_give_other_orders_where_they_are_secret():
    seed = derived_seed(SECRET + 7, "site-1", "train")
    assert seed >= SECRET and derived_seed(7, "site-1", "train") < 2**56
    others = [seed ^ (1 << bit) for bit in range(254)]
    drawn = {tuple(next(orders(20, other))) for other in (seed, *others)}
    assert len(drawn) == 255


@pytest.mark.parametrize("seed", [3, derived_seed(SECRET, "x")], ids=["public", "secret"])
def test_orders_are_permutations_uniform_and_the_same_each_time(seed):
    drawn = list(islice(orders(4, seed), 4800))
    assert (drawn == list(islice(orders(4, seed), 4800)) and drawn[0] != drawn[1]) or drawn[1] != drawn[2]
    _, counts = np.unique([[tuple(order)] for order in drawn], axis=0, return_counts=True)
    assert len(counts) == 24 and stats.chisquare(counts).pvalue > NEVER
    assert list(next(orders(0, seed))) == []


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(1)], ids=["real", "simulated"])
def test_noise_is_normal_and_draws_are_uniform(generator):
    assert stats.kstest(standard_normals(20_000, generator).numpy(), "norm").pvalue > NEVER
    assert stats.kstest(uniforms(20_000, generator).numpy(), "uniform").pvalue > NEVER


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


def test_a_key_that_occurs_twice_is_refused_by_name(tmp_path):
    for text in cases(__file__, "twice.yaml"):
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


WRONG = yaml.safe_load(Path(__file__).with_name("wrong_settings.yaml").read_text())


class Example(Settings):
    steps: int = Field(3, ge=1, le=9, description="updates per task")
    rate: float = Field(0.5, gt=0, lt=1)
    on: bool = True
    kind: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    pairs: tuple[tuple[float, float], ...] = ()
    least: int | None = Field(None, ge=1)

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.kind == "b" and not self.names:
            yield "names", "given for kind 'b'"


@pytest.mark.parametrize(("values", "words"), WRONG)
def test_a_wrong_setting_is_named_with_what_is_allowed(values, words):
    with pytest.raises(ConfigError, match=f"^job: {words}"):
        build(Example, values, "job")
    for make in (Example, Example().replace):
        with pytest.raises(ConfigError, match=f"^Example: {words}"):
            make(**values)


class Needed(Settings):
    seed: int = Field(description="of everything")


@pytest.mark.parametrize(("kind", "values", "word"), [(Example, {3: 3}, "'3'"), (Example, ["steps"], r"\['steps'\]"),
                                                    (Needed, None, "'seed' is missing")])  # fmt: skip
def test_names_that_are_no_text_what_is_no_mapping_and_what_is_missing(kind, values, word):
    with pytest.raises(ConfigError, match=f"job: .*{word}"):
        build(kind, values, "job")


def test_the_digest_tells_settings_apart_and_not_how_they_were_written():
    def digest(lora, **data):
        return RunSettings(lora=lora, data=DataConfig(**data)).digest()

    assert digest(LoRAConfig(alpha=8)) == digest(LoRAConfig(alpha=8.0), periods=[])
    assert digest(LoRAConfig()) != digest(LoRAConfig(rank=5))
    with pytest.raises(ValueError, match="frozen"):
        LoRAConfig().rank = 5


PLACES = {
    "model.lora_targets": lambda globs: preset("tiny", lora_targets=globs),
    "model.targets": lambda globs: ClassifierConfig(targets=globs),
    "lora.exchange": lambda globs: LoRAConfig(exchange=globs),
    "policy.lora_targets": lambda globs: Bounds(lora_targets=globs),
    "extra_names": lambda globs: OutboundGuard(["fedtar"], extra_names=globs),
}
"""All that a job or a site writes names in."""
EXPRESSIONS = ["(.*)*!", ".*", r"decoder\..*\.c_fc", "(a|b)", "a+", "[ab", "a..b", "!", "a,b", "", "x" * 301]


@given(st.text("a*?.[]!-b", max_size=MAX_LENGTH))
@example("*a" * 100 + "!")
@example("*?" * 150)
def test_no_text_takes_long_to_be_refused_or_to_be_matched(text):
    assert problem_of([text]) is None or "not of regular expressions" in problem_of([text])
    matches("a" * 300, [text] * 20)


@pytest.mark.parametrize("place", PLACES)
def test_what_was_a_regular_expression_is_refused_with_the_way_to_write_it(place):
    for text in EXPRESSIONS:
        with pytest.raises(ConfigError, match="not of regular expressions"):
            PLACES[place]([text])
    for wrong, words in (("encoder.*", "list"), (["a"] * (MAX_GLOBS + 1), "at most")):
        with pytest.raises(ConfigError, match=words):
            PLACES[place](wrong)
    with pytest.raises(ConfigError, match=r"'decoder\.\*\.c_fc'"):
        PLACES[place]([r"decoder\..*\.c_fc"])
    PLACES[place](["*", "decoder.h.[0-5].c_*", "!decoder.?.bias"])


def test_a_number_with_an_exponent_is_one_without_a_point_too():
    text = "{a: 1e-3, b: -2E4, c: 1.5e+2, d: e3, e: 1e, f: '1e-3', g: 0x1e3, h: 1e3f, i: .5e1}"
    numbers = {"a": 1e-3, "b": -2e4, "c": 150.0, "g": 0x1E3, "i": 5.0}
    assert parse_yaml(text, "here") == numbers | {"d": "e3", "e": "1e", "f": "1e-3", "h": "1e3f"}


def test_the_speed_of_long_work_is_without_its_start(monkeypatch):
    """The first unit takes a minute, since everything is loaded then; each other one takes half a second."""
    lines: list[str] = []
    clock = iter([0.0, *(60 + half / 2 for half in range(40))])
    monkeypatch.setattr("fedtar_flare.core.text.time.monotonic", lambda: next(clock))
    progress = Progress("image", 40, lines.append, every=5.0)
    for done in range(1, 41):
        progress(done)
    others = [f"image {done} of 40, 2.0/s, {(40 - done) / 2:.0f} s left" for done in (11, 21, 31)]
    assert lines == ["image 1 of 40", *others]
