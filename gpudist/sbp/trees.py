"""Tensors within arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors within arguments or results, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    tensors: list[torch.Tensor] = []
    for part in tree:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif isinstance(part, (list, tuple, dict)):
            tensors += tensors_in(part)
    return tensors


def has_any(parts: Iterable[Any], kind: type) -> bool:
    """Return whether an instance of ``kind`` is in ``parts`` or in lists, tuples or dicts there."""
    left = [*parts]
    for x in left:
        if isinstance(x, kind):
            return True
        if isinstance(x, (list, tuple)):
            left += x
        elif isinstance(x, dict):
            left += x.values()
    return False


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to the leaves of ``tree``; lists, tuples and dicts keep their types."""
    if isinstance(tree, (list, tuple)):
        parts = [map_tree(part, change) for part in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        if hasattr(tree, "n_fields"):
            # torch's type for named results, a subclass of tuple.
            return type(tree)(parts)  # pyright: ignore
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, dict):
        return {name: map_tree(part, change) for name, part in tree.items()}
    return change(tree)
