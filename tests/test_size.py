"""The package and its tests stay within ``tests/size.txt``, which names the promises that came."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "gpudist"


def statements(source: str) -> int:
    """Return the number of statements, of which docstrings are none."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return len(nodes) - sum(map(is_text, nodes))


def is_text(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case _:
            return False


def test_size() -> None:
    lines = [line.split() for line in (TESTS / "size.txt").read_text().splitlines()]
    limits = {line[0]: int(line[1]) for line in lines if line and line[0] != "#"}
    sizes = {
        "statements": sum(statements(path.read_text()) for path in PACKAGE.rglob("*.py")),
        "lines_of_tests": sum(
            path.read_bytes().count(b"\n")
            for path in TESTS.rglob("*.py")
            if "__pycache__" not in path.parts
        ),
    }
    assert sizes.keys() == limits.keys()
    over = {what: (n, limits[what]) for what, n in sizes.items() if n > limits[what]}
    assert not over, f"size and limit: {over}; withdraw a promise, or name the new one in size.txt"
