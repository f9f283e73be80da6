"""Imports point down, geometry is integers only, and one module reads the environment."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpudist import nn

PACKAGE = Path(__file__).resolve().parents[1] / "gpudist"
# From the top; rooms on one line are of one height and do not import each other.
FLOORS = [
    ["cli"],
    ["planning", "checkpoint", "testing"],
    ["convert"],
    ["sbp"],
    ["nn", "batch", "amp", "data", "profiling", "pictures"],
    ["ops"],
    ["exchange"],
    ["world"],
    ["transport"],
    ["geometry"],
    ["checks", "recycling"],
    ["errors", "version"],
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
    """What ``source``, as the module ``gpudist.ROOM...``, does that its room may not."""
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


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


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
        ("gpudist.geometry.halo", "import torch"),
        ("gpudist.geometry.halo", "from torch import distributed"),
        ("gpudist.transport.gloo", "import os\nos.environ['RANK']"),
        ("gpudist.transport.gloo", "from os import getenv"),
        ("gpudist.attic", ""),
    ],
)
def test_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gpudist.world.partition", "from gpudist import errors\nimport gpudist.transport.base"),
        ("gpudist.ops.gather", "from gpudist.ops import repartition\nfrom . import scatter"),
        ("gpudist.testing", "import gpudist.world.runtime\nimport torch"),
        ("gpudist.world.runtime", "import os\nos.environ.get('RANK')"),
    ],
)
def test_allowed_import_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def imports_at_run_time(tree: ast.AST) -> ast.AST:
    """``tree`` without what is imported for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return tree


def graph_of_modules(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """What each module imports, by sources and whether they are of packages."""
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


def test_a_circle_is_found() -> None:
    circle = {
        "gpudist.a": ("from gpudist import b", False),
        "gpudist.b": ("def f():\n    from gpudist.a import g", False),
    }
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph_of_modules(circle)).prepare()
    for_types = "if TYPE_CHECKING:\n    from gpudist.a import g"
    circle["gpudist.b"] = for_types, False
    graphlib.TopologicalSorter(graph_of_modules(circle)).prepare()


def test_nn_shows_its_public_names_alone() -> None:
    assert dir(nn) == sorted(nn.__all__)


def test_relative_import_in_a_package() -> None:
    assert violations("from . import halo\nfrom .. import errors", "gpudist.geometry", True) == []
    assert len(violations("from .. import nn", "gpudist.geometry", True)) == 1
