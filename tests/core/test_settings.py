"""Settings: what is refused and how it is said, and names by globs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import MAX_GLOBS, MAX_LENGTH, Settings, build, digest, matches, problem_of
from fedtar_flare.learning.config import DataConfig, LoRAConfig
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.models.config import preset
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.site.site_file import Bounds

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


def test_lists_stand_for_tuples_and_whole_numbers_for_numbers():
    from_json = Example(**json.loads('{"names": ["a"], "pairs": [[1, 2]]}'))
    assert from_json == Example(names=("a",), pairs=((1.0, 2.0),)) and hash(from_json) == hash(from_json.replace())
    assert type(from_json.pairs[0][0]) is float
    assert build(Example, json.loads(json.dumps(from_json.to_dict())), "job") == from_json
    with pytest.raises(ValueError, match="frozen"):
        from_json.steps = 4


def test_the_digest_tells_settings_apart_and_not_how_they_were_written():
    assert digest(LoRAConfig(alpha=8), DataConfig()) == digest(LoRAConfig(alpha=8.0), DataConfig(periods=[]))
    assert digest(LoRAConfig(), DataConfig()) != digest(LoRAConfig(rank=5), DataConfig())


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
