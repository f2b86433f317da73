"""One assertion for every refusal."""

from contextlib import contextmanager

import pytest

from fedtar_flare.core.errors import DataError


@contextmanager
def refused(reason, match=None):
    """The block raises a DataError with this reason (or one of several); its text matches."""
    with pytest.raises(DataError, match=match) as error:
        yield error
    assert error.value.reason in ((reason,) if isinstance(reason, str) else reason), str(error.value)
