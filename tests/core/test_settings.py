import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import Field

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import Settings, build, digest
from fedtar_flare.learning.config import DataConfig, LoRAConfig

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


def test_settings_do_not_change_and_the_defaults_are_taken():
    with pytest.raises(ValueError, match="frozen"):
        Example().steps = 4
    assert build(Example, None, "job") == build(Example, {}, "job") == Example()
    assert Example().replace(steps=4) == Example(steps=4)


def test_the_digest_tells_settings_apart_and_not_how_they_were_written():
    assert digest(LoRAConfig(alpha=8), DataConfig()) == digest(LoRAConfig(alpha=8.0), DataConfig(periods=[]))
    assert digest(LoRAConfig(), DataConfig()) != digest(LoRAConfig(rank=5), DataConfig())
