"""A budget: no room of gpudist has more statements than ``tests/budget.json`` holds.

Docstrings and comments are free. ``python -m tests.test_budget`` writes the present numbers, plus
1 %; commit them with the reason why a room has to grow.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "gpudist"
BUDGET = Path(__file__).with_name("budget.json")


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


def rooms() -> Counter[str]:
    """Return the number of statements of each room: of a folder, or of a file beside them."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found[room] += statements(path.read_text())
    return found


def test_no_room_exceeds_its_budget() -> None:
    budget = json.loads(BUDGET.read_text())
    over = {
        room: (n, budget.get(room, 0)) for room, n in rooms().items() if n > budget.get(room, 0)
    }
    assert over == {}, (
        f"statements and budget: {over}; remove statements, or write the new numbers with "
        "python -m tests.test_budget"
    )


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""Text."""\nx = 1', 1),
        ('def f():\n    """Text."""\n    # Comment.\n    return 1', 2),
        ("if x:\n    y = 1\nelse:\n    z = (1,\n        2)", 3),
        ("a = 1; b = 2", 2),
        ('f("text")', 1),
    ],
)
def test_statements(source: str, count: int) -> None:
    assert statements(source) == count


if __name__ == "__main__":
    numbers = {room: -(-n * 101 // 100) for room, n in sorted(rooms().items())}
    BUDGET.write_text(json.dumps(numbers, indent=1) + "\n")
