"""The pages of docs/reference that follow from the code are those of the code."""

import sys

import pytest

from tools.make_reference import PAGES, REFERENCE


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse words its help differently in other versions")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name):
    assert PAGES[name]() == (REFERENCE / name).read_text(encoding="utf-8"), "run python -m tools.make_reference"
