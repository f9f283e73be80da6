"""Copy a network, including tensors of an earlier call that its modules keep."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from gpudist.errors import ConversionError

# Objects that deepcopy does not look into.
_ATOMS = (str, bytes, type, FunctionType, MethodType, ModuleType)


def copy_network(network: torch.nn.Module, memo: dict[int, Any] | None = None) -> torch.nn.Module:
    """Deep-copy a network; tensors that it keeps and that are not leaves are detached.

    Torch copies only leaves. ``weight_norm`` keeps others as attributes, and a network that has run
    may keep features in lists, dicts or objects.

    Args:
        network: network.
        memo: copies to use, by the identity of the original.

    Raises:
        ConversionError: something cannot be copied; the message names module and attribute.
    """
    memo = memo or {}
    for x in list(_not_leaves(network, set())):
        memo.setdefault(id(x), x.detach().clone())
    initial_memo = memo.copy()
    try:
        return copy.deepcopy(network, memo)
    except Exception as error:
        where = _place_of_failure(network, initial_memo)
        if where is None:
            raise
        raise ConversionError(
            f"distribute: {where} cannot be copied ({type(error).__name__}: {error}); delete it "
            "before the network is converted, or give its class a __deepcopy__"
        ) from error


def _not_leaves(kept: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors that are not leaves within ``kept``, as far as deepcopy follows it."""
    pending = [kept]
    while pending:
        x = pending.pop()
        if id(x) in seen or isinstance(x, _ATOMS):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            if not x.is_leaf:
                yield x
        elif isinstance(x, Mapping):
            pending += [*x.values()]
        elif isinstance(x, (list, tuple, set, frozenset)):
            pending += x
        if not isinstance(x, torch.Tensor) and not hasattr(type(x), "__deepcopy__"):
            slots = [getattr(x, name, None) for name in getattr(type(x), "__slots__", ())]
            pending += [*getattr(x, "__dict__", {}).values(), *slots]


def _place_of_failure(network: torch.nn.Module, memo: dict[int, Any]) -> str | None:
    for path, module in network.named_modules():
        for name, value in vars(module).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(value, memo.copy())
            except Exception:
                return f"attribute {name!r} of {path or 'the network'}"
    return None
