"""Imports point down, rooms read no private names of others, and one module the environment."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "gpudist"
# From the top; rooms on one line are of one height and do not import each other.
FLOORS = [
    ["cli"],
    ["planning", "checkpoint", "testing"],
    ["pictures"],
    ["capturing", "convert"],
    ["sbp"],
    ["nn", "batch", "amp", "data", "profiling"],
    ["ops"],
    ["exchange"],
    ["world"],
    ["transport"],
    ["geometry"],
    ["cache", "checks", "recycling"],
    ["errors", "native", "version"],
]
HEIGHT = {room: -floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv"}


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Full names of what ``module`` imports; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) + is_package - node.level] if node.level else []
            parent = ".".join(base + ([node.module] if node.module else []))
            yield from (f"{parent}.{alias.name}" for alias in node.names)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """List the rules that ``source``, as the module ``gpudist.ROOM...``, breaks."""
    tree = ast.parse(source)
    room = module.split(".")[1]
    if module == "gpudist.__main__":
        return []
    if room not in HEIGHT:
        return [f"{module}: {room!r} is not in the list of rooms"]
    found: list[str] = []
    for name in imported_modules(tree, module, is_package):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if room == "geometry" and top == "torch":
            found.append(f"{module} imports {name}: geometry is integers only")
        if top != "gpudist" or other in (room, "_native"):
            continue
        if other not in HEIGHT:
            found.append(f"{module} imports {name}: name the room it is in")
        elif HEIGHT[other] >= HEIGHT[room]:
            found.append(f"{module} imports {name}: imports point down")
    if module != "gpudist.world.runtime":
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used |= {name.rpartition(".")[2] for name in imported_modules(tree, module, is_package)}
        found += [
            f"{module} uses {word}: only runtime reads the environment"
            for word in sorted(used & ENVIRONMENT)
        ]
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


# The names of the package, which no room imports.
NAMES = {PACKAGE / "__init__.py", PACKAGE / "_names.py"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path not in NAMES)


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) for path in FILES])
def test_file_keeps_to_its_room(path: Path) -> None:
    assert violations(path.read_text(), module_name(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gpudist.transport.gloo", "from gpudist.world.partition import Partition"),
        ("gpudist.transport.gloo", "from gpudist import nn"),
        ("gpudist.transport.gloo", "from gpudist import Partition"),
        ("gpudist.transport.gloo", "import gpudist"),
        ("gpudist.transport.gloo", "from .. import nn"),
        ("gpudist.world.partition", "def f():\n    import gpudist.ops.broadcast"),
        ("gpudist.testing", "from gpudist.planning import advise"),
        ("gpudist.convert.edits", "from gpudist.pictures import draw"),
        ("gpudist.geometry.halo", "import torch"),
        ("gpudist.geometry.halo", "from torch import distributed"),
        ("gpudist.transport.gloo", "import os\nos.environ['RANK']"),
        ("gpudist.transport.gloo", "from os import getenv"),
        ("gpudist.attic", ""),
    ],
)
def test_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


def imports_at_run_time(tree: ast.AST) -> ast.AST:
    """``tree`` without what is imported for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return tree


def graph_of_modules(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Return the imports of each module, given its source and whether it is a package."""
    graph: dict[str, set[str]] = {}
    for module, (source, is_package) in sources.items():
        names = imported_modules(imports_at_run_time(ast.parse(source)), module, is_package)
        # ``from a import b`` is of the module ``a.b``, or of ``b`` in the module ``a``.
        found = {name if name in sources else name.rpartition(".")[0] for name in names}
        graph[module] = found & sources.keys() - {module}
    return graph


def test_no_module_imports_itself_in_a_circle() -> None:
    sources = {module_name(p): (p.read_text(), p.name == "__init__.py") for p in FILES}
    order = list(graphlib.TopologicalSorter(graph_of_modules(sources)).static_order())
    assert set(order) == set(sources)


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(module_name(path))
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


# Functions that read an attribute by its name, as a string.
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")


def private_attributes(tree: ast.AST) -> set[str]:
    """Private names of methods and attributes of the classes in ``tree``."""
    found: set[str] = set()
    for kind in ast.walk(tree):
        if not isinstance(kind, ast.ClassDef):
            continue
        found |= {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
        for node in kind.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            found |= {name.id for name in targets if isinstance(name, ast.Name)}
        found |= {
            node.attr
            for node in ast.walk(kind)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        }
    return {name for name in found if is_private(name)}


def private_reads(tree: ast.AST, room: str, attributes: dict[str, set[str]]) -> list[str]:
    """Private names of other rooms in a module of ``room``.

    Args:
        tree: the module.
        room: which may name its own, and those that its classes inherit, by ``self``.
        attributes: the private ones of the classes of each room.
    """
    others = {name for one in attributes for name in attributes[one]} - attributes.get(room, set())
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {a.asname or a.name.partition(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def is_of_other_room(origin: str) -> bool:
        package, _, rest = origin.partition(".")
        return package == "gpudist" and rest.partition(".")[0] not in ("_native", room)

    found = [
        origin
        for origin in imported.values()
        if is_of_other_room(origin) and is_private(origin.rpartition(".")[2])
    ]
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=function), args=given) if function in BY_NAME:
                names = [a.value for a in given if isinstance(a, ast.Constant)]
                found += [name for name in names if isinstance(name, str) and name in others]
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        base = ast.unparse(node.value)
        origin = imported.get(base.partition(".")[0], "")
        if origin and not origin.startswith("gpudist."):
            # A private name of another package.
            continue
        if is_of_other_room(origin) or (
            node.attr in others and base not in ("self", "cls", "super()")
        ):
            found.append(f"{base}.{node.attr}")
    return found


def test_rooms_keep_their_private_names() -> None:
    trees = {module_name(path): ast.parse(path.read_text()) for path in FILES}
    attributes: dict[str, set[str]] = {}
    for module, tree in trees.items():
        attributes.setdefault(module.split(".")[1], set()).update(private_attributes(tree))
    found = {m: private_reads(tree, m.split(".")[1], attributes) for m, tree in trees.items()}
    assert {module: reads for module, reads in found.items() if reads} == {}
