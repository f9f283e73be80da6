"""Arguments of torch's functions as rules read them: in torch's order, by torch's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from gpudist.sbp.trees import has_any, map_tree

# NumPy's names, which torch accepts too.
_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def bind_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with Python's numbers and torch's names, and the tensors in order.

    Tensors given by name become positional if torch's order is another one, or if the first
    argument is among them.
    """
    if has_any((*args, *kwargs.values()), np.generic):
        args, kwargs = map_tree(args, _number), map_tree(kwargs, _number)
    if not kwargs:
        return args, kwargs
    kwargs = {_NAMES.get(name, name): argument for name, argument in kwargs.items()}
    named = [
        name
        for name, argument in kwargs.items()
        if name != "out" and has_any((argument,), torch.Tensor)
    ]
    if not named:
        return args, kwargs
    for names in _orders(function):
        if all(name in names[len(args) :] for name in named):
            order = [names.index(name) for name in named]
            if args and order == sorted(order):
                break
            moved = names[len(args) : max(order) + 1]
            if all(name in kwargs for name in moved):
                args = (*args, *[kwargs[name] for name in moved])
                return args, {n: argument for n, argument in kwargs.items() if n not in moved}
    return args, kwargs


def _number(leaf: Any) -> Any:
    return leaf.item() if isinstance(leaf, np.generic) else leaf


@cache
def _orders(function: Callable[..., Any]) -> list[tuple[str, ...]]:
    """Return the names of the positional arguments, for each overload of the function."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        return [tuple(p.name for p in parameters if p.kind in kinds)]
    except (TypeError, ValueError):
        pass
    overloads = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    if overloads is None:
        return []
    schemas = [getattr(overloads, name)._schema for name in overloads.overloads()]
    return [
        tuple("input" if a.name == "self" else a.name for a in schema.arguments if not a.kwarg_only)
        for schema in schemas
    ]
