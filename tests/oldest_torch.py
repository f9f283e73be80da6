"""Names of torch in gpudist's code that the oldest torch allowed does not have.

Most tests run with one torch only, so ``oldest_torch.json`` lists the public names of the oldest in
each module and class of torch that gpudist uses, and the private names in use. It is written by

    PYTHONPATH=. /path/to/its/python -m tests.oldest_torch
"""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HERE = Path(__file__).parent
LIST = HERE / "oldest_torch.json"
SOURCES = sorted((HERE.parent / "gpudist").rglob("*.py"))
TENSOR = "torch.Tensor"
# Where names that are given as text are looked up.
BY_TEXT = (TENSOR, "torch", "torch.nn.functional")


@dataclass
class Uses(ast.NodeVisitor):
    """Lines and dotted names of torch in a source, without those that a condition guards.

    Guards are ``if`` with ``hasattr``, a version or ``TYPE_CHECKING``, and ``for`` with an ``if``
    that asks ``hasattr`` of its variable.
    """

    names: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    texts: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    _known: dict[str, str] = field(default_factory=dict[str, str])
    _tensors: set[str] = field(default_factory=set[str])

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "torch":
                self._known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                self.names.append((node.lineno, alias.name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self._known[alias.asname or alias.name] = name
                self.names.append((node.lineno, name))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._dotted(node)
        if name:
            self.names.append((node.lineno, name))
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier():
            self.texts.append((node.lineno, node.value))

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called == "hasattr" or (called == "getattr" and len(node.args) == 3):
            node.args.pop(1)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = self._tensors
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        own = {
            a.arg for a in arguments if a.annotation is not None and self._is_tensor(a.annotation)
        }
        self._tensors = before - {a.arg for a in arguments} | own
        self.generic_visit(node)
        self._tensors = before

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        condition = ast.unparse(node.test)
        if not any(word in condition for word in ("hasattr(", "version", "TYPE_CHECKING")):
            self.generic_visit(node)

    visit_IfExp = visit_If  # noqa: N815

    def visit_For(self, node: ast.For) -> None:
        tests = [ast.unparse(part.test) for part in node.body if isinstance(part, ast.If)]
        asked = f", {ast.unparse(node.target)})"
        if not any("hasattr(" in test and asked in test for test in tests):
            self.generic_visit(node)

    def _dotted(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return TENSOR if node.id in self._tensors else self._known.get(node.id, "")
        owner = self._dotted(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else ""

    def _is_tensor(self, annotation: ast.expr) -> bool:
        parts = ast.unparse(annotation).replace(" | None", "").split(".")
        return ".".join([self._known.get(parts[0], parts[0]), *parts[1:]]) == TENSOR


def uses_of(source: str) -> Uses:
    uses = Uses()
    uses.visit(ast.parse(source))
    return uses


def missing(source: str, listed: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the line and the name of each use that the listed torch does not have."""
    uses = uses_of(source)
    for line, name in uses.names:
        for space, part in _steps(name):
            if space == "torch.ops.gpudist":
                break
            if space not in listed:
                if _is_space(_resolved(space)):
                    yield f"{line}: {space} is not in {LIST.name}; write it anew with that torch"
                break
            # A tensor by its annotation may be one of ours.
            if part not in listed[space] and (space != TENSOR or hasattr(torch.Tensor, part)):
                yield f"{line}: {space}.{part}"
                break
    for line, text in uses.texts:
        spaces = [space for space in BY_TEXT if hasattr(_resolved(space), text)]
        if spaces and not any(text in listed[space] for space in spaces):
            yield f"{line}: {spaces[0]}.{text}, as text"


def _steps(name: str) -> Iterator[tuple[str, str]]:
    parts = name.split(".")
    yield from ((".".join(parts[:i]), parts[i]) for i in range(1, len(parts)))


def _resolved(name: str) -> Any:
    found: Any = torch
    for space, part in _steps(name):
        owner, found = found, getattr(found, part, None)
        if found is None and isinstance(owner, ModuleType):
            # Some modules are no attribute, or none before they are imported.
            with suppress(ImportError):
                found = importlib.import_module(f"{space}.{part}")
    return found


def _is_space(found: object) -> bool:
    return isinstance(found, ModuleType | type)


def write() -> None:
    """Write the names of the torch that is imported: public ones, and the private ones in use."""
    uses = [uses_of(path.read_text()) for path in SOURCES]
    used = {step for each in uses for _, name in each.names for step in _steps(name)}
    used |= {(space, text) for each in uses for _, text in each.texts for space in BY_TEXT}
    names: dict[str, set[str]] = {}
    for space, part in sorted(used):
        owner = _resolved(space)
        if _is_space(owner):
            if space not in names:
                listed = [] if space.startswith(("torch._", "torch.ops")) else dir(owner)
                names[space] = {name for name in listed if not name.startswith("_")}
            if _resolved(f"{space}.{part}") is not None or hasattr(owner, part):
                names[space].add(part)
    rows = {space: " ".join(sorted(names[space])) for space in sorted(names)}
    LIST.write_text(json.dumps({"version": torch.__version__, **rows}, indent=0) + "\n")


if __name__ == "__main__":
    write()
