"""What is public has a reference docstring; what another module imports has a docstring.

Public is what others build on: the names in ``__all__`` of the modules that docs/reference/python-reference.md lists.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^(Parameters|Returns|Yields|Raises|Attributes|Examples|Notes)\n-+\n", flags=re.M)
RECORDS = {"NamedTuple", "Settings", "Event", "BaseModel", "TypedDict"}
"""Bases of classes whose fields are described one by one."""
NOT_DOCUMENTED = {"NotImplementedError", "AttributeError", "SystemExit", "StopIteration"}
EXTERNAL = {"Executor", "ModelController", "Module", "Filter", "FedJob", "Recipe", "Builder", "HTMLParser", "Transform",
            "Dataset", "Exception", "Widget", "FLComponent"}  # fmt: skip
"""Bases of other packages, whose methods are documented there."""


TREES = {}
for file in sorted((ROOT / "fedtar_flare").rglob("*.py")):
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    TREES[name] = ast.parse(file.read_text(encoding="utf-8"))
CLASSES = {node.name: node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def listed(tree):
    """What ``__all__`` lists."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [element.value for element in node.value.elts]
    return []


def defined(tree):
    """Functions, classes and constants of a module by name."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = node
    return found


def imports(tree):
    """Module and names of each import from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in TREES:
            yield node.module, {alias.name for alias in node.names}


IMPORTED = {module: set() for module in TREES}
"""Names that other modules import, by module."""
for tree in TREES.values():
    for origin, names_of_it in imports(tree):
        IMPORTED[origin] |= names_of_it


def sections(node):
    parts = SECTION.split(ast.get_docstring(node) or "")
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented(text):
    """Names that a section describes: ``a, b : int``."""
    lines = [line for line in (text or "").splitlines() if line and not line[0].isspace()]
    return {name.lstrip("*") for line in lines for name in line.split(" : ")[0].split(", ")}


def parameters(node, method):
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if method and "staticmethod" not in map(ast.unparse, node.decorator_list):
        names = names[1:]
    names += [argument.arg for argument in (*arguments.kwonlyargs, arguments.vararg, arguments.kwarg) if argument]
    return [name for name in names if not name.startswith("_")]


def raised(node):
    """Exceptions that a function raises itself, and does not catch."""
    found, left = set(), list(node.body)
    while left:
        part = left.pop()
        if isinstance(part, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(part, ast.Try) and any("Exception" in ast.unparse(h.type or part) for h in part.handlers):
            left += [*part.handlers, *part.orelse, *part.finalbody]
            continue
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call) and isinstance(part.exc.func, ast.Name):
            found |= {part.exc.func.id} if part.exc.func.id[0].isupper() else set()
        left += ast.iter_child_nodes(part)
    return found - NOT_DOCUMENTED


def function_problems(node, method=False):
    if not ast.get_docstring(node):
        return ["no docstring"]
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return []
    parts = sections(node)
    problems = [f"parameter {n}" for n in parameters(node, method) if n not in documented(parts.get("Parameters"))]
    returns = ast.unparse(node.returns) if node.returns else "None"
    if returns not in ("None", "NoReturn") and not {"Returns", "Yields"} & parts.keys():
        problems.append("what it returns")
    return problems + [f"that it raises {name}" for name in sorted(raised(node)) if name not in parts.get("Raises", "")]


def ancestors(node):
    for base in node.bases:
        name = ast.unparse(base).split("[")[0].split(".")[-1]
        yield name
        if name in CLASSES and CLASSES[name] is not node:
            yield from ancestors(CLASSES[name])


def class_problems(node):
    text, parts, bases = ast.get_docstring(node) or "", sections(node), set(ancestors(node))
    described = documented(parts.get("Parameters")) | documented(parts.get("Attributes"))
    if not text:
        yield "no docstring"
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is not None:
        described |= documented(sections(init).get("Parameters"))
        if not re.search(r"as\s+:class:", text):  # a subclass may point to its base
            yield from (f"parameter {name}" for name in parameters(init, True) if name not in described)
    elif bases & RECORDS or any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
                continue
            name, own = ast.unparse(field.target), isinstance(after, ast.Expr) or "description=" in ast.unparse(field)
            if not (own or name in described or name.startswith("_")):
                yield f"field {name}"
    above = (part for base in bases & CLASSES.keys() for part in CLASSES[base].body)
    inherited = {part.name for part in above if isinstance(part, ast.FunctionDef)}
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_") or method.name in inherited:
            continue
        if bases & EXTERNAL and not ast.get_docstring(method):
            continue
        if not any(word in ast.unparse(d) for d in method.decorator_list for word in ("overload", ".setter")):
            yield from (f"{method.name}: {problem}" for problem in function_problems(method, True))


def test_the_python_interface_lists_the_public_modules_and_extensions_import_no_others():
    page = (ROOT / "docs" / "reference" / "python-reference.md").read_text(encoding="utf-8")
    public = {module for module, tree in TREES.items() if listed(tree)} - {"fedtar_flare"}
    assert public == set(re.findall(r"^::: (\S+)$", page, flags=re.M))
    for file in (ROOT / "examples").rglob("*.py"):
        for module, names in imports(ast.parse(file.read_text(encoding="utf-8"))):
            assert names <= {*listed(TREES[module])} | {"registry"}, f"{file.name}: {module}"


@pytest.mark.parametrize("module", TREES)
def test_what_is_public_has_a_reference_docstring(module):
    names, nodes = listed(TREES[module]), defined(TREES[module])
    shared = [nodes[name] for name in IMPORTED[module] & nodes.keys()]
    problems = [n.name for n in shared if isinstance(n, ast.FunctionDef | ast.ClassDef) and not ast.get_docstring(n)]
    for name in names:
        node = nodes.get(name)
        if isinstance(node, ast.FunctionDef):
            problems += [f"{name}: {problem}" for problem in function_problems(node)]
        elif isinstance(node, ast.ClassDef):
            problems += [f"{name}: {problem}" for problem in class_problems(node)]
    assert not problems, "not documented"


BANNED = {"told", "found", "many", "said", "there", "lets", "asks", "standing", "place", "places", "doors", "turns"}
BANNED |= {"own", "kept", "alone", "division"}
"""Words that stood for too many things: docs/glossary.md has those that took their place."""
NAMES_OF_OTHERS = {"get_num_standing_tasks", "own_words"}
"""FLARE's own, and a key of site files."""


def public_identifiers(module):
    """Names that are public or that other modules import, and of their parameters, methods and fields."""
    tree = TREES[module]
    nodes = defined(tree)
    for name in {*listed(tree)} | (IMPORTED[module] & nodes.keys()):
        yield name
        parts = [nodes[name], *nodes[name].body] if isinstance(nodes.get(name), ast.ClassDef) else [nodes.get(name)]
        for part in parts:
            if isinstance(part, ast.AnnAssign):
                yield ast.unparse(part.target)
            elif isinstance(part, ast.FunctionDef) and (not part.name.startswith("_") or part.name == "__init__"):
                yield from (part.name, *parameters(part, method=len(parts) > 1))


@pytest.mark.parametrize("module", TREES)
def test_public_names_are_of_the_glossary_s_words(module):
    names = {name for name in public_identifiers(module) if not name.startswith("_")} - NAMES_OF_OTHERS
    riddles = {n for n in names if BANNED & set(re.findall("[a-z]+", re.sub("([A-Z])", r"_\1", n).lower()))}
    assert not riddles, "docs/glossary.md has the word for it"
