"""Halo exchange: each worker's block together with every cell its kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, cast

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.errors import ShapeError
from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Plan, Stage
from gpudist.geometry.halo import halo_of, plan_halo
from gpudist.geometry.halo_choice import costs_less_nested
from gpudist.geometry.windows import HaloWidths, Window
from gpudist.ops.arrays import Array, apply_to_array
from gpudist.ops.operator import Operator, cached_operator, require_cartesian
from gpudist.ops.operators import operator
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition

# Largest width of a halo, in global extents.
_MOST_TURNS = 100
_DIFFERING = (
    "the ranks' halo widths, (left, right) per dim, or periodic differ:{}\npass the same on all "
    "ranks; for halos that differ between ranks, pass window=, the kernel that reads them"
)


@operator("halo_exchange", lambda kind, P_x: kind(P_x, halo=[(1, 2), (1, 0)]), (7, 5))
class HaloExchange(Operator):
    """Send each worker the cells that its kernel reads; see :func:`halo_exchange`.

    Args:
        P_x ... shape: see :func:`halo_exchange`.

    Attributes:
        halo: options that decide the plan, over all dims.
        padding_value: see :func:`halo_exchange`.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        window: Sequence[Window] | None = None,
        *,
        halo: Sequence[tuple[int, int]] | None = None,
        periodic: Sequence[bool] | bool = False,
        padding_value: float = 0.0,
        nested: bool | None = False,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        require_cartesian("HaloExchange", P_x)
        self.halo = halo_of("HaloExchange", P_x.dim, window, halo, periodic, nested)
        self.padding_value = padding_value
        # All ranks pass the window of the same kernel, but their halo widths may differ by mistake.
        # Each rank also plans for the others.
        alike: dict[str, Any] = {}
        if halo is not None:
            pairs = [astuple(cast(HaloWidths, window)) for window in self.halo.windows]
            alike["alike"] = f"halo={pairs}, periodic={list(self.halo.periodic)}"
            alike["differing"] = _DIFFERING
        super().__init__(P_x, P_x, P_x.dim, True, global_shape, shape, **alike)

    def _bind(self, layout: BlockLayout, x: torch.Tensor) -> Movement:
        self._require_narrow(layout.decomposition.shape)
        return self.bind_to(layout.decomposition, layout.dtype, x)

    def _require_narrow(self, global_shape: Sequence[int]) -> None:
        # Every rank allocates its halo, and a periodic one has boxes for each turn.
        for dim, (window, extent) in enumerate(zip(self.halo.windows, global_shape, strict=True)):
            width = max(astuple(window)) if isinstance(window, HaloWidths) else 0
            if width > _MOST_TURNS * max(extent, 1):
                raise ShapeError(
                    f"HaloExchange, dim {dim}: a halo of {width} cells is more than {_MOST_TURNS} "
                    f"times as wide as the global extent {extent}; pass narrower widths"
                )

    def bind_to(
        self,
        inputs: Decomposition,
        dtype: torch.dtype,
        x: torch.Tensor,
        windows: Sequence[Window] | None = None,
    ) -> Movement:
        """Bind the movement of a tensor of ``dtype`` split like ``inputs``, on the device of ``x``.

        It is empty on workers outside ``P_x``. ``windows`` replace those of the operator.
        """
        index = self.P_x.index
        anywhere = index if index is not None else (0,) * self.P_x.dim
        halo = self.halo if windows is None else replace(self.halo, windows=tuple(windows))
        if halo.nested is None:
            # The costs that are known are NCCL's.
            is_known = self.P_x.wire.has_streams
            nested = is_known and costs_less_nested(inputs, halo, dtype.itemsize)
            halo = replace(halo, nested=nested)
        plan = plan_halo(inputs, halo, anywhere)
        if index is None:
            plan = Plan(plan.key, -1, tuple(Stage(None, None) for _ in plan.stages))
        label = f"halo_exchange on {list(self.P_x.shape)} of {list(inputs.shape)}"
        fill = self.padding_value
        return bind(plan, self.P_x, label, dtype, x.shape, x.dtype, tuple(x.shape), fill)


def halo_exchange(
    x: Array,
    P_x: CartesianPartition,
    window: Sequence[Window] | None = None,
    *,
    halo: Sequence[tuple[int, int]] | None = None,
    periodic: Sequence[bool] | bool = False,
    padding_value: float = 0.0,
    nested: bool | None = False,
    global_shape: Sequence[int] | None = None,
    shape: ShapeMode = "static",
) -> Array:
    """Return this worker's block of ``x`` together with every cell its kernel reads.

    Collective over ``P_x``.

    Args:
        x: owned block, a tensor or a NumPy or CuPy array, shape ``[..., *spatial]``.
        P_x: partition of the global tensor, one axis per dim of ``x``.
        window: kernel, stride, dilation and padding per spatial dim, in cells, or
        halo: widths ``(left, right)`` per spatial dim, in cells, the same on all ranks; negative
            widths drop own cells. For halos that differ between ranks, pass ``window``.
        periodic: whether cells beyond the global edge are copied from the opposite edge, per
            spatial dim.
        padding_value: value of cells beyond the global edge of dims that are not periodic.
        nested: exchange one dim after the other instead of with all neighbours at once. ``None``
            chooses by messages and bytes, the same on all ranks; it is False unless the transport
            is nccl.
        global_shape: global shape of the balanced tensor; saves the agreement on the blocks and on
            ``halo``.
        shape: ``"dynamic"`` makes the ranks agree at every call.

    Returns:
        New tensor, or array if ``x`` is one, of shape ``[..., *needed]``; a clone of ``x`` on
        workers outside ``P_x``.

    Adjoint:
        Ghost cells are added into the cells they were copied from.

    Cost:
        One message per worker that owns a needed cell, ``itemsize * cells`` bytes each. With
        ``halo`` and without ``global_shape``, one more small all-gather at the first call.

    Raises:
        PlanMismatch: on every rank alike, if ``halo`` or ``periodic`` differ between ranks.
        ShapeError: on every rank alike, if the kernel does not fit the padded global extent.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    make, windows = HaloExchange, window
    if is_dynamo_compiling():
        make, windows = _of_numbers, _numbers(window)
    if type(halo) is list:
        halo = tuple(halo)  # has a hash, so that the look-up below is fast
    operator = cached_operator(
        make, P_x, (windows, halo, periodic, padding_value, nested, global_shape, shape)
    )
    return apply_to_array(operator, x)


def _numbers(windows: Sequence[Any] | None) -> list[tuple[Any, ...]] | None:
    # torch.compile does not accept Window objects as constants: pass classes and numbers.
    if windows is None:
        return None
    return [(type(w), *[getattr(w, name) for name in w.__match_args__]) for w in windows]


def _of_numbers(
    P_x: CartesianPartition, windows: Sequence[tuple[Any, ...]] | None, *options: Any
) -> HaloExchange:
    rebuilt = None if windows is None else tuple(kind(*numbers) for kind, *numbers in windows)
    return cached_operator(HaloExchange, P_x, (rebuilt, *options))
