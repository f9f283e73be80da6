"""Specs of global tensors: one shared object per placement, layout, shape and dtype."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from gpudist.cache import Cache, cache_of
from gpudist.geometry.layout import Layout, NdSbp, broadcast
from gpudist.sbp.call import strides_of
from gpudist.sbp.functions import dispatch_functions
from gpudist.sbp.placement import Placement

_Wrapper = TypeVar("_Wrapper", bound=torch.Tensor)


class GlobalSpec:
    """Placement, attributes, global shape and dtype of global tensors.

    Tensors with the same spec share one object, so that specs compare quickly.

    Attributes:
        placement: ranks that hold the tensor.
        sbp: attribute along each axis of the placement.
        shape, size: global shape, as a tuple and as torch's type.
        dtype: dtype.
        strides: strides that the whole tensor would have; ``None`` if it would be contiguous.
        layout: cells of each rank.
        calls: cached calls whose first tensor has this spec.
        is_held: whether operators keep the layout, at any cost in bytes.
    """

    __slots__ = (
        "_held",
        "calls",
        "dtype",
        "is_held",
        "layout",
        "placement",
        "sbp",
        "shape",
        "size",
        "strides",
    )

    def __init__(
        self,
        placement: Placement,
        sbp: NdSbp,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        dispatch_functions()
        self.placement, self.sbp, self.shape, self.dtype = placement, sbp, shape, dtype
        self.size, self.strides = torch.Size(shape), strides
        self.layout: Layout = placement.layout(sbp, shape)
        self.calls = Cache[Any, Any](1024)
        self.is_held = False
        self._held: GlobalSpec | None = None

    def __repr__(self) -> str:
        grid = list(self.placement.shape)
        return f"{list(self.shape)} {self.dtype} {self.sbp} on a grid {grid}"

    def __deepcopy__(self, memo: object) -> GlobalSpec:
        return self

    @property
    def held(self) -> GlobalSpec:
        """This spec for tensors whose layout operators keep."""
        if self._held is None:
            self._held = GlobalSpec(self.placement, self.sbp, self.shape, self.dtype, self.strides)
            self._held.is_held = True
        return self._held


def global_spec(
    placement: Placement,
    sbp: NdSbp,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    strides: tuple[int, ...] | None = None,
) -> GlobalSpec:
    """Return the shared object for this spec."""
    remembered: Any = placement.partition.wire.remembered
    specs = cache_of(remembered, "global_specs", 8192)
    key = (placement, sbp, shape, dtype, strides)
    return specs.get_or_make(key, lambda: GlobalSpec(*key))


make_wrapper: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore


def wrap(kind: type[_Wrapper], local: torch.Tensor, how: GlobalSpec) -> _Wrapper:
    """Wrap this rank's part as a global tensor with the given spec."""
    wrapper: Any = make_wrapper(
        kind, how.shape, strides=how.strides, dtype=how.dtype, device=local.device
    )
    wrapper._local = local
    wrapper._global_spec = how
    return wrapper


def wrap_copies(kind: type[_Wrapper], x: torch.Tensor, placement: Placement) -> _Wrapper:
    """Wrap ``x``, which each rank holds in full; ranks outside of ``placement`` keep no cells."""
    local = x if placement.active else x.reshape(-1)[:0]
    copies = (broadcast,) * placement.axes
    spec = global_spec(placement, copies, tuple(x.shape), x.dtype, strides_of(x))
    return wrap(kind, local, spec)


def spec_of(x: Any) -> GlobalSpec:
    """Return the spec of the global tensor ``x``."""
    return x._global_spec


def local_of(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a global tensor; return a plain tensor unchanged."""
    return getattr(x, "_local", x)


def on_axes_of(x: _Wrapper, placement: Placement) -> _Wrapper | None:
    """Return the tensor on a placement that differs from its own only in axes of length 1.

    The axes of a tensor that is a copy on each rank may be any. Returns ``None`` for any other
    ``placement``.
    """
    how = spec_of(x)
    if placement == how.placement:
        return x
    if placement.partition.ranks != how.placement.partition.ranks:
        return None
    if all(attribute == broadcast for attribute in how.sbp):
        copies = (broadcast,) * placement.axes
        spec = global_spec(placement, copies, how.shape, how.dtype, how.strides)
        return wrap(type(x), local_of(x), spec)
    several = [[n for n in P.shape if n > 1] for P in (placement, how.placement)]
    if several[0] != several[1]:
        return None
    pairs = zip(how.placement.shape, how.sbp, strict=True)
    attributes = iter([attribute for n, attribute in pairs if n > 1])
    sbp = tuple(next(attributes) if n > 1 else broadcast for n in placement.shape)
    spec = global_spec(placement, sbp, how.shape, how.dtype, how.strides)
    return wrap(type(x), local_of(x), spec)
