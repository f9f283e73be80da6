"""Cache of the results of binding for each input shape, eagerly and under torch.compile."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.cache import Cache
from gpudist.checks.storage import storage_problem
from gpudist.errors import ShapeError
from gpudist.exchange.carry import never_repeated
from gpudist.exchange.torch_library import handles_of
from gpudist.exchange.tracing import (
    binding_for_compiler,
    constant_when_traced,
    has_modes,
    is_traced,
    outside_torch,
    refuse_vmap,
)
from gpudist.ops.shape_agreement import ShapeAgreement, ShapeMode

T = TypeVar("T")


class BindCache(Generic[T]):
    """Cache of objects bound to the shape, dtype and device of a tensor.

    Args:
        shape: ``"dynamic"`` caches nothing: the ranks agree at every call.
        agreement: agreement of the ranks, if it may be dynamic.

    Attributes:
        repeat: repeats the last call in native code if ``x`` and the state of torch are as they
            were, otherwise returns ``None``. Not to be called while torch.compile traces.
    """

    def __init__(self, shape: ShapeMode, agreement: ShapeAgreement | None = None) -> None:
        self._remembers = shape != "dynamic"
        self._agreement = agreement
        self._results = Cache[tuple[object, ...], T]()
        self.repeat: Callable[[Any], torch.Tensor | None] = never_repeated

    def __deepcopy__(self, memo: dict[int, Any]) -> BindCache[T]:
        # Bound objects belong to the original, so a copy binds again, with the same agreement.
        shape: ShapeMode = "static" if self._remembers else "dynamic"
        return BindCache(shape, copy.deepcopy(self._agreement, memo))

    def __call__(self, x: torch.Tensor, make: Callable[..., T], *numbers: int) -> T:
        """Return ``make(x, *numbers)``, cached for tensors like ``x`` and the same numbers."""
        if is_traced():
            return self._bind_into_graph(x, make, *numbers)
        return self.get(x, make, *numbers)

    def get(self, x: torch.Tensor, make: Callable[..., T], *numbers: int) -> T:
        """Do the same outside of traces."""
        if not self._remembers:
            return _bind_outside_torch(make, x, *numbers)
        try:
            key = (x.shape, x.dtype, x.device, *numbers)
            result = self._results.get(key)
        except (RuntimeError, TypeError) as error:
            raise ShapeError(storage_problem(x) or f"a tensor without a shape: {error}") from error
        if result is None:
            result = self._results[key] = _bind_outside_torch(make, x, *numbers)
        return result

    def _bind_into_graph(self, x: torch.Tensor, make: Callable[..., T], *numbers: int) -> T:
        """Bind while a graph is traced, so that the result becomes part of the graph."""
        # operator.index converts symbols to numbers, so the graph is for this shape only.
        shape = [operator.index(extent) for extent in x.shape]
        plain_numbers = [operator.index(number) for number in numbers]
        name, agreed = _bind_while_tracing(
            self, make.__func__, make.__self__, len(shape), *shape, *plain_numbers,
            dtype=x.dtype, device=x.device, compiled=is_dynamo_compiling(),
        )  # fmt: skip
        if not self._remembers:
            (agreement,) = handles_of(self._agreement)
            torch.ops.gpudist.check(agreement, x, "confirm", [agreed], None)
        return getattr(self, name)


def _bind_outside_torch(make: Callable[..., T], x: torch.Tensor, *numbers: int) -> T:
    # This also works in transforms and modes, where new tensors have no memory.
    refuse_vmap()
    if has_modes():
        x = _stand_in(x.shape, x.dtype, x.device, x.requires_grad)
    with outside_torch():
        return make(x, *numbers)


def _stand_in(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool = False
) -> torch.Tensor:
    # A tensor with memory, on which ranks can agree.
    with outside_torch():
        x = torch.empty((), dtype=dtype, device=device, requires_grad=requires_grad)
        return x.expand(tuple(shape))


@constant_when_traced
def _bind_while_tracing(
    cache: BindCache[Any],
    make: Callable[..., Any],
    owner: object,
    dims: int,
    *shape_and_numbers: int,
    dtype: torch.dtype,
    device: torch.device,
    compiled: bool,
) -> tuple[str, int]:
    """Bind for such a tensor; return the attribute with the result, and the agreement's number."""
    shape, numbers = shape_and_numbers[:dims], shape_and_numbers[dims:]
    with outside_torch(), binding_for_compiler() if compiled else nullcontext():
        result = cache(_stand_in(shape, dtype, device), partial(make, owner), *numbers)
    agreed = 0
    if not cache._remembers and cache._agreement is not None:
        agreed = cache._agreement.number
    name = re.sub(r"\W+", "_", f"_traced_{shape}_with_{numbers}_{dtype}_{device}_{agreed}")
    if not hasattr(cache, name):
        setattr(cache, name, result)
    return name, agreed
