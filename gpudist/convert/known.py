"""Values of small tensors that are known in a dry run, whose tensors have no data.

A forward may read values of its inputs or of tensors that it creates: whether a mask is all ones,
how long a range is. In a dry run such a tensor has no data, but it can be recomputed cheaply on the
CPU. A global tensor carries the value of the full tensor. All other tensors are assumed to be
finite, because forwards check for that.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gpudist.errors import GpudistError
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.outer import changes_in_place
from gpudist.sbp.trees import map_tree, tensors_in

T = torch.Tensor
_VALUE = "_gpudist_value"
_MOST_CELLS = 1 << 20
_FAILED = object()
READS = {
    T.item, T.tolist, T.__bool__, T.__int__, T.__index__, T.__float__, T.equal,
    torch.equal, torch.is_nonzero, T.is_nonzero, T.numpy, T.__array__, T.__complex__,
}  # fmt: skip
_DRAW = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.empty, torch.normal,
    torch.empty_like, torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli,
    torch.multinomial, T.new_empty, T.uniform_, T.normal_, T.random_, T.bernoulli_, T.bernoulli,
    T.multinomial, T.exponential_,
}  # fmt: skip
_FINITE = {
    torch.isfinite: True, T.isfinite: True, torch.isinf: False, T.isinf: False,
    torch.isnan: False, T.isnan: False,
}  # fmt: skip


def know(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attach ``value`` to ``x``, which has no data, and return ``x``."""
    if _is_small(value):
        vars(x)[_VALUE] = value.detach()
    return x


def know_copy(x: torch.Tensor, value: torch.Tensor, copies: dict[int, Any]) -> torch.Tensor:
    """Attach a copy of ``value``, into which the dry run may write, to ``x``, and return ``x``.

    ``copies`` is the memo of earlier copies: values that share memory have copies that share it.
    """
    return know(x, copy.deepcopy(value.detach(), copies)) if _is_small(value) else x


def value_of(x: Any) -> torch.Tensor | None:
    """Return the known value of ``x``, or ``None``."""
    return vars(x).get(_VALUE) if _may_be_known(x) else None


class KnownValues(TorchFunctionMode):
    """Mode that propagates known values through calls, and answers reads of values with them."""

    def __init__(self) -> None:
        super().__init__()
        # Memory that received unknown values; the references prevent its reuse.
        self._spoiled: dict[int, torch.UntypedStorage] = {}
        # Memory of values into which a call that is under way will write.
        self._written: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in([args, kwargs])
        known = all(self._is_known(x) for x in tensors)
        if func in READS and tensors and known:
            # A real run copies the value to the host, and sends messages if it is in blocks; a dry
            # run, whose tensors have no data, fails when both have been noted.
            try:
                func(*args, **kwargs)
            except GpudistError:
                raise
            except (RuntimeError, TypeError) as error:
                if "meta " not in str(error).lower():
                    raise
            return _of_values(func, args, kwargs)
        if tensors and changes_in_place(func, kwargs):
            return self._write(func, args, kwargs, known)
        result = func(*args, **kwargs)
        if func in _FINITE and not known:
            answer = torch.tensor(_FINITE[func], device="cpu")
            vars(result)[_VALUE] = answer.expand(result.shape)
        results = tensors_in(result)
        is_small = results and max(y.numel() for y in results) <= _MOST_CELLS
        if known and is_small and func not in _DRAW:
            values = _attempt(func, args, kwargs)
            if type(values) is type(result) or isinstance(result, GlobalTensor):
                for y, value in zip(results, tensors_in(values), strict=False):
                    if _may_be_known(y) and y.shape == value.shape:
                        know(y, value)
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
        """Call a function that writes into its first tensor, then write into its value once.

        A converted network enters the mode twice, so the call arrives again from within.
        """
        value = value_of(args[0])
        place = None if value is None else value.untyped_storage()._cdata
        if place is None or place in self._written:
            return func(*args, **kwargs)
        self._written.add(place)
        try:
            result = func(*args, **kwargs)
        finally:
            self._written.discard(place)
        if not (known and _attempt(func, args, kwargs) is not _FAILED):
            self._spoil(args[0])
        return result

    def _is_known(self, x: torch.Tensor) -> bool:
        value = value_of(x)
        return value is not None and value.untyped_storage()._cdata not in self._spoiled

    def _spoil(self, x: Any) -> None:
        value = vars(x).pop(_VALUE, None) if _may_be_known(x) else None
        if value is not None:
            storage = value.untyped_storage()
            self._spoiled[storage._cdata] = storage


def _is_small(value: torch.Tensor) -> bool:
    return value.numel() <= _MOST_CELLS and value.device.type == "cpu"


def _may_be_known(x: Any) -> bool:
    return isinstance(x, GlobalTensor) or (type(x) is T and x.is_meta)


def _of_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Call the function on the known values, on the CPU."""

    def value(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return vars(x)[_VALUE] if isinstance(x, T) else x

    named = {name: x for name, x in kwargs.items() if name != "device"}
    with torch.device("cpu"):
        return func(*map_tree(args, value), **map_tree(named, value))


def _attempt(func: Any, args: Any, kwargs: Any) -> Any:
    try:
        return _of_values(func, args, kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return _FAILED
