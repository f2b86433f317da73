"""What the documentation quotes, names and promises, against the code."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from fedtar_flare.flare.controller import MethodController
from fedtar_flare.flare.report_executor import ReportExecutor
from fedtar_flare.flare.requirements import leaving
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.methods import METHODS, contract_of
from fedtar_flare.protocol.messages import Reply

BASES = {base.__name__: base for base in (MethodController, ReportExecutor, ReportLearner)}
PAGES = (
    "README.md",
    "docs/method.md",
    "docs/metrics.md",
    "docs/scale.md",
    "docs/tour.md",
    "provisioning/README.md",
    "CHANGELOG.md",
)


def read(repository, page):
    return (repository / page).read_text(encoding="utf-8")


def test_fragments_of_the_method_page_are_the_code_itself(repository):
    text = read(repository, "docs/method.md")
    quotes = re.findall(r"^<!-- from (\S+) -->\n```python\n(.*?)^```", text, flags=re.M | re.S)
    assert len(quotes) == text.count("```python") > 8, "every fragment says which file it is from"
    for file, fragment in quotes:
        assert fragment in read(repository, file), f"{file} no longer has:\n{fragment}"


def test_the_method_page_has_ten_steps_and_names_hooks_and_files_that_exist(repository):
    text = read(repository, "docs/method.md")
    assert re.findall(r"^## (\d+)\.", text, flags=re.M) == [str(n) for n in range(1, 11)]
    hooks = re.findall(r"`(\w+)\.(\w+)`", text)
    hooks = [(base, hook) for base, hook in hooks if base in BASES]
    assert len(hooks) > 15
    assert [hook for hook in hooks if not hasattr(BASES[hook[0]], hook[1])] == []
    files = re.findall(r"`(fedtar_flare/[\w/]+(?:\.py|/))`", text)
    assert files and [file for file in files if not (repository / file).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_links_to_exist(repository, page):
    folder = (repository / page).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(repository, page))
    assert [link for link in links if not (folder / link).exists()] == []


def test_the_table_of_what_leaves_names_every_field_and_no_other(repository):
    """A field that a contract lets pass and the README does not name would leave unannounced."""
    section = read(repository, "README.md").partition("## What leaves a hospital")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    named = {name for row in rows[1:] for name in re.findall(r"`(\w+)`", row[2])}
    declared = {field.name for name in METHODS for task in contract_of(name).tasks for field in task.fields}
    wrapping = {field.name for field in fields(Reply)} - {"numbers", "payload"}
    assert named == declared | wrapping


@pytest.mark.parametrize("name", METHODS)
def test_the_description_of_a_job_names_every_field_and_group(name):
    contract, said = contract_of(name), leaving(contract_of(name))
    for task, described in zip(contract.tasks, said["tasks"], strict=True):
        assert set(described["fields"]) == {field.name for field in task.fields}
        assert [tensors["group"] for tensors in described["tensors"]] == list(task.up)


def test_the_readme_stays_short(repository):
    assert len(read(repository, "README.md").splitlines()) < 250
