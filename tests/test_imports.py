"""What import-linter (pyproject.toml) does not see: modules that a text names, and what is slow to import."""

from __future__ import annotations

import ast

import pytest
from command import loaded_by
from test_docstrings import TREES


def test_a_text_that_names_a_module_names_one_of_its_own_room():
    """Classes of a contract, tasks of a worker: nothing is reached from below by a text."""
    foreign, modules = set(), set(TREES) - {"fedtar_flare"}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.replace(":", ".")
                if any(room(one) != room(module) for one in {name, name.rpartition(".")[0]} & modules):
                    foreign.add(module)
    assert foreign == {"fedtar_flare.site.policy"}


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
