"""Small errors put into a module's source, one at a time."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE,),
    ast.LtE: (ast.Lt,),
    ast.Gt: (ast.GtE,),
    ast.GtE: (ast.Gt,),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list"}
_ATTRIBUTES = {"start": "stop", "stop": "start", "left": "right", "right": "left"}


@dataclass(frozen=True)
class Mutant:
    """A module with one error.

    Attributes:
        line: where it is, from 1.
        change: in words.
        source: of the whole module.
    """

    line: int
    change: str
    source: str


def mutants(source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of its text."""
    count = sum(1 for _ in _changes(ast.parse(source)))
    found: list[Mutant] = []
    for number in range(count):
        tree = ast.parse(source)
        line, before, change = list(_changes(tree))[number]
        text = ast.unparse(before)
        change()
        after = ast.unparse(ast.fix_missing_locations(tree))
        if after != ast.unparse(ast.parse(source)):
            found.append(Mutant(line, f"{text}  ->  {_changed_line(source, after)}", after))
    return found


def _changed_line(source: str, after: str) -> str:
    before = ast.unparse(ast.parse(source)).splitlines()
    differing = [b for a, b in zip(before, after.splitlines(), strict=False) if a != b]
    return differing[0].strip() if differing else "left out"


def _changes(tree: ast.Module) -> Iterator[tuple[int, Any, Callable[[], None]]]:
    for node in _code(tree):
        line = getattr(node, "lineno", 0)
        for change in _changes_of(node):
            yield line, node, change


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the executed code: no annotations, docstrings, decorators, texts of errors."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(child, ast.JoinedStr) or (
                isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            )
            # That lists are of one length is asserted by it, and true.
            is_assertion = isinstance(child, ast.keyword) and child.arg == "strict"
            if isinstance(child, ast.AST) and not (is_text or is_assertion):
                yield child
                # The text of an exception is not mutated; whether it is raised is tested.
                if not isinstance(child, (ast.Raise, ast.ImportFrom, ast.Import)):
                    yield from _code(child)


def _changes_of(node: ast.AST) -> Iterator[Callable[[], None]]:
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            for other in _COMPARISONS[type(operator)]:
                yield lambda i=i, other=other: node.ops.__setitem__(i, other())
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _ARITHMETIC:
        yield lambda: setattr(node, "op", _ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        other = ast.And if isinstance(node.op, ast.Or) else ast.Or
        yield lambda: setattr(node, "op", other())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield lambda: _replace(node, node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        value = node.value
        yield lambda: setattr(node, "value", not value if isinstance(value, bool) else value + 1)
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield lambda: setattr(node, "id", _NAMES[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
        yield lambda: setattr(node, "attr", _ATTRIBUTES[node.attr])
    elif isinstance(node, ast.IfExp):
        yield lambda: _replace(node, node.body)
        yield lambda: _replace(node, node.orelse)
    elif isinstance(node, (ast.Raise, ast.Continue)):
        yield lambda: _replace(node, ast.Pass())


def _replace(node: ast.AST, other: ast.AST) -> None:
    fields = vars(other).copy()
    node.__class__ = type(other)
    vars(node).clear()
    vars(node).update(fields)
