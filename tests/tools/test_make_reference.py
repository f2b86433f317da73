"""The pages of docs/reference that follow from the code are those of the code."""

import sys

import pytest

from tools.make_reference import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name):
    if name == "cli.md" and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse words its help differently in other versions of Python")
    assert PAGES[name]() == (REFERENCE / name).read_text(encoding="utf-8"), "run python -m tools.make_reference"
