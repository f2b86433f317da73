"""How the package's files may import each other. That rooms stand on floors is import-linter's (pyproject.toml)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from command import loaded_by
from test_docstrings import TREES

PACKAGE = "fedtar_flare"
LARGEST_ROOM = 0.15
"""Of the package's lines."""

BY_NAME = {
    "fedtar_flare",  # its public names, on first use
    "fedtar_flare.runtime.deployed",  # a job's classes, of a list of four
    "fedtar_flare.data.sources",  # the registry of sources: a site imports the one that it has
}
"""Modules that may import a module by a name that is put together at run time."""


@pytest.fixture(scope="module")
def nodes():
    """Module name to all nodes of its syntax tree."""
    return {module: list(ast.walk(tree)) for module, tree in TREES.items()}


def imported(node, modules):
    """Modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules
    if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(PACKAGE):
        return set()
    inner = {f"{node.module}.{alias.name}" for alias in node.names}
    # a name that is no module is an object of the package it is taken from
    return (inner & modules) | ({node.module} if inner - modules else set())


def test_no_circle_between_files(nodes):
    """At the top, within functions and under TYPE_CHECKING alike."""
    modules = set(nodes)
    graph = {}
    for module, found in nodes.items():
        graph[module] = set().union(*(imported(node, modules) for node in found)) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_only_the_registries_import_by_name(nodes):
    found = set()
    for module, inside in nodes.items():
        names = {node.id for node in inside if isinstance(node, ast.Name)}
        names |= {node.attr for node in inside if isinstance(node, ast.Attribute)}
        if names & {"import_module", "__import__"}:
            found.add(module)
    assert found == BY_NAME


def test_a_text_that_names_a_module_names_one_of_its_own_room(nodes):
    """Classes of a contract, tasks of a worker: nothing is reached from below by a text."""
    foreign, modules = set(), set(nodes) - {PACKAGE}
    for module, inside in nodes.items():
        for node in inside:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.replace(":", ".")
                if any(room(one) != room(module) for one in {name, name.rpartition(".")[0]} & modules):
                    foreign.add(module)
    assert foreign == {"fedtar_flare.site.policy"}


def test_no_room_is_too_large():
    lines = Counter()
    for module, tree in TREES.items():
        lines[room(module)] += tree.body[-1].end_lineno if tree.body else 0
    name, largest = lines.most_common(1)[0]
    assert largest <= LARGEST_ROOM * lines.total(), f"{name} has {largest} of {lines.total()} lines: divide it"


def room(module):
    """``fedtar_flare.data.sources.manifest`` stands in ``data``; a method of several files is a room of its own."""
    parts = module.split(".")
    return ".".join(parts[1:3] if parts[1:2] == ["methods"] and len(parts) == 4 else parts[1:2])


@pytest.mark.parametrize(
    ("module", "more"),
    [("fedtar_flare.cli.main", "pydantic"), ("fedtar_flare.provision.status", ""), ("fedtar_flare.reporting.page", ""),
     ("fedtar_flare.models.config", "timm")],
)  # fmt: skip
def test_what_only_reads_or_helps_waits_for_no_learning(module, more):
    """torch, FLARE and transformers take seconds to import."""
    program = f"import {module}; from fedtar_flare.cli.main import parser; parser()"
    assert loaded_by(program, "torch", "nvflare", "transformers", "peft", "monai", more) == []


def test_the_doctor_asks_torch_for_a_gpu_only_beside_a_driver():
    program = (
        "import sys; from fedtar_flare.site.doctor import environment; environment._has_driver = lambda: False; "
        "from fedtar_flare.cli.main import main; main(['doctor']); print(sorted({'torch', 'monai'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "GPU: none" in done.stdout and done.stdout.splitlines()[-1] == "[]"
