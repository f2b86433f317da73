import hashlib
import hmac
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.cells import FRACTIONS, keyed_unit, split_of

KEY = bytes(range(32))


@given(st.text(min_size=1), st.binary(min_size=16, max_size=64))
def test_the_keyed_number_is_the_head_of_the_hmac(text, key):
    digest = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    assert keyed_unit(text, key) == (int(digest[:16], 16) >> 11) / 2**53
    assert 0 <= keyed_unit(text, key) < 1


def test_fractions_are_met_within_statistics():
    n = 20_000
    seen = Counter(split_of(f"patient-{i}", KEY) for i in range(n))
    for split, share in zip(("train", "validation", "test"), FRACTIONS, strict=True):
        assert abs(seen[split] - n * share) < 4 * np.sqrt(n * share * (1 - share))


def test_a_short_key_is_refused():
    with pytest.raises(ConfigError):
        split_of("p", b"short")
