"""Names by globs: what they match, and that no text holds whoever matches it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import MAX_GLOBS, MAX_LENGTH, matches, problem_of
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.models.classifier import ClassifierConfig
from fedtar_flare.models.config import preset
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.site.site_file import Bounds

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
