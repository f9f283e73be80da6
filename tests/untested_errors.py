"""List the ``raise`` statements of gpudist that no test executes, from ``make coverage``'s data."""

from __future__ import annotations

import ast
from pathlib import Path

import coverage  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[1]


def raises(source: str) -> list[tuple[int, int]]:
    """The first and last line of every ``raise`` statement, but of methods left to subclasses."""
    return [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise)
        and not (isinstance(node.exc, ast.Name) and node.exc.id == "NotImplementedError")
    ]


def main() -> None:
    measured = coverage.Coverage()
    measured.load()
    data = measured.get_data()
    total, untested = 0, []
    for path in sorted((ROOT / "gpudist").rglob("*.py")):
        lines = path.read_text().splitlines()
        executed = set(data.lines(str(path)) or ())
        for first, last in raises("\n".join(lines)):
            total += 1
            if not executed & set(range(first, last + 1)):
                untested.append(f"{path.relative_to(ROOT)}:{first}: {lines[first - 1].strip()}")
    print("\n".join(untested))
    print(f"{len(untested)} of {total} raise statements are executed by no test")


if __name__ == "__main__":
    main()
