"""How a global tensor lies: one object for all tensors that lie in one way."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from gpudist.ops.bound import Recent
from gpudist.sbp.attributes import NdSbp
from gpudist.sbp.layout import Layout
from gpudist.sbp.placement import Placement

_REMEMBERED = 8192

_Wrapper = TypeVar("_Wrapper", bound=torch.Tensor)


class Lies:
    """Placement, attributes, global shape and dtype of global tensors.

    Two tensors that lie alike have the same object, so that one is told from another at a glance.

    Attributes:
        layout: which cells each rank has.
        calls: calls with such a tensor as the first, as they are remembered.
    """

    __slots__ = ("calls", "dtype", "layout", "placement", "sbp", "shape")

    def __init__(
        self, placement: Placement, sbp: NdSbp, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.placement, self.sbp, self.shape, self.dtype = placement, sbp, shape, dtype
        self.layout: Layout = placement.layout(sbp, shape)
        self.calls: dict[Any, Any] = {}


def lies(placement: Placement, sbp: NdSbp, shape: tuple[int, ...], dtype: torch.dtype) -> Lies:
    """The one object for tensors that lie like this."""
    remembered: Any = placement.partition.wire.remembered
    found: Recent[Lies] = remembered.get("lies")
    if found is None:  # pyright: ignore[reportUnnecessaryComparison]
        found = remembered.setdefault("lies", Recent(_REMEMBERED))
    key = (placement, sbp, shape, dtype)
    return found(key, lambda: Lies(placement, sbp, shape, dtype))


_make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore


def wrapped(kind: type[_Wrapper], local: torch.Tensor, how: Lies) -> _Wrapper:
    """A global tensor of this part."""
    wrapper: Any = _make(kind, how.shape, dtype=how.dtype, device=local.device)
    wrapper._local = local
    wrapper._lies = how
    return wrapper
