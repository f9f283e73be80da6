"""Check the English of docstrings and messages; part of ``make lint``.

Summary lines begin with a verb or a noun phrase, short private functions have no docstring, and
texts avoid the negations in ``NEGATIONS``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gpudist", "benchmarks", "examples", "docs", "release", "tests")
FIRST = {"Of", "Those", "That", "As", "What", "Itself", "Whose"}
NEGATIONS = re.compile(r"\bis none of\b|(?<!there )\bis no\b(?! longer| more| later| earlier)")
MOST_LINES = 6
Problem = tuple[int, str]


def problems(source: str) -> Iterator[Problem]:
    """Lines of Python source that break a rule, and why."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _of_docstring(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = NEGATIONS.search(" ".join(node.value.split()))
            if found:
                yield node.lineno, f'"{found[0]}": say what it is, or "is not a ..."'


def _of_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[Problem]:
    docstring = ast.get_docstring(node)
    if docstring is None:
        return
    line = node.body[0].lineno
    first = docstring.split(None, 1)[0].strip("`*,.:;")
    if first in FIRST:
        yield line, f'the summary begins with "{first}": begin with a verb or a noun phrase'
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        is_private = node.name.startswith("_") and not node.name.endswith("__")
        lines = (node.body[-1].end_lineno or 0) - (node.body[0].end_lineno or 0)
        if is_private and lines <= MOST_LINES:
            yield line, f"{node.name} has {lines} lines: let its name say what it does"


def of_text(text: str) -> Iterator[Problem]:
    """Lines of a page that break a rule; code is left out."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        found = None if is_code else NEGATIONS.search(line)
        if found:
            yield number, f'"{found[0]}": say what it is, or "is not a ..."'


def main() -> int:
    count = 0
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
    files = [each for folder in FOLDERS for each in sorted((ROOT / folder).rglob("*.py"))]
    folders = ("docs", "gpudist", "benchmarks", "tests")
    pages += [each for folder in folders for each in sorted((ROOT / folder).rglob("*.md"))]
    for file in [*files, *pages]:
        text = file.read_text(encoding="utf-8")
        for line, problem in problems(text) if file.suffix == ".py" else of_text(text):
            print(f"{file.relative_to(ROOT)}:{line}: {problem}")
            count += 1
    print(f"{count} sentences to rewrite")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
