"""Keep torch from importing its compiler, which takes seconds, where nothing is compiled.

Torch computes the shapes of many results in Python, by functions that it hides from its compiler.
The first call of each imports ``torch._dynamo`` to do so, although there is nothing to hide from
before a program compiles. Private names of torch that only this file reads: ``_disable_dynamo``,
its attribute ``__dynamo_disable`` of a function, and the table of decompositions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import _refs
from torch._decomp import global_decomposition_table

_HIDDEN = "__dynamo_disable"


@cache
def call_shape_functions_directly() -> None:
    """Let functions for shapes run without the compiler, until it is imported."""
    if "torch._dynamo" not in sys.modules:
        functions = list(_hidden_functions())
        for function in functions:
            setattr(function, _HIDDEN, function)
        sys.meta_path.insert(0, _Restoring(functions))


class _Restoring:
    """Finder of no module: it gives the functions back to torch when the compiler is imported."""

    def __init__(self, functions: list[Any]) -> None:
        self._functions = functions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch._dynamo":
            for function in self._functions:
                vars(function).pop(_HIDDEN, None)
            self._functions = []


def _hidden_functions() -> Iterator[Any]:
    wrapper: Any = torch._disable_dynamo(len)  # pyright: ignore[reportPrivateUsage]
    tables = [*global_decomposition_table.values(), vars(_refs)]
    todo = [function for table in tables for function in table.values()]
    seen: set[int] = set()
    while todo:
        function = todo.pop()
        if isinstance(function, FunctionType) and id(function) not in seen:
            seen.add(id(function))
            inner = [cell.cell_contents for cell in function.__closure__ or ()]
            todo += inner
            if function.__code__ is wrapper.__code__:
                yield inner[function.__code__.co_freevars.index("fn")]
