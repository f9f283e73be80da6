"""Linear layers whose weight is cut as the plan says."""

from __future__ import annotations

import torch

from gpudist.convert.layers import LAYERS
from gpudist.convert.plan import Shape
from gpudist.convert.values import Pooled, resized
from gpudist.convert.wanted import Wanted
from gpudist.errors import ConversionError
from gpudist.nn import DistributedLinear
from gpudist.partition import CartesianPartition


def grid_of_input(
    path: str, P_x: CartesianPartition, chosen: Shape | None, wanted: Wanted
) -> Shape | None:
    """Where the input of a linear layer must be, ``None`` if it may stay on ``P_x``.

    Raises:
        ConversionError: the plan moves the input elsewhere than it cuts the weight for.
    """
    weight = wanted.weight(path)
    if weight is None:
        return chosen
    _require_axes(weight, P_x)
    needed = (*weight[:-2], weight[-1])
    if chosen is not None and tuple(chosen) != needed:
        raise ConversionError(
            f"the plan cuts the weight by {list(weight)}, for an input on {list(needed)}, but "
            f"moves the input to {list(chosen)}"
        )
    return None if P_x.shape == needed else needed


def converted_linear(
    layer: torch.nn.Linear,
    path: str,
    P_x: CartesianPartition,
    wanted: Wanted,
    replicate_parameters: bool,
) -> tuple[torch.nn.Module, CartesianPartition]:
    """The distributed layer, and the partition of its output."""
    weight = wanted.weight(path)
    if weight is None or tuple(weight[-2:]) == (1, 1):
        if P_x.shape[-1] > 1:
            raise ConversionError(
                f"its input on {list(P_x.shape)} is split along the features; cut the weight too, "
                f"by plan.split_weight({path!r}, {[*P_x.shape[:-1], 1, P_x.shape[-1]]}), or move "
                f"the input, by plan.repartition({path!r}, [...])"
            )
        new = LAYERS[torch.nn.Linear](layer, P_x, replicate_parameters)
        return new, resized(P_x) if isinstance(P_x, Pooled) else P_x
    _require_axes(weight, P_x)
    P_w = wanted.partition(weight, P_x.dim + 1)
    P_y = wanted.partition(weight[:-1], P_x.dim)
    new = DistributedLinear(
        P_x,
        P_y,
        P_w,
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,  # pyright: ignore[reportUnnecessaryComparison]
        device=P_x.device,
        dtype=layer.weight.dtype,
        replicate_parameters=replicate_parameters,
    )
    return new, resized(P_y)


def cut_of_weight(layer: torch.nn.Module | None) -> Shape | None:
    """The grid that cuts a linear layer's weight, ``None`` where it is whole."""
    if not isinstance(layer, DistributedLinear):
        return None
    rows, columns = layer.P_y.shape[-1], layer.P_x.shape[-1]
    return None if rows == columns == 1 else (*layer.P_x.shape[:-1], rows, columns)


def _require_axes(weight: Shape, P_x: CartesianPartition) -> None:
    if len(weight) != P_x.dim + 1:
        raise ConversionError(
            f"the plan cuts the weight by {list(weight)}; for an input on {list(P_x.shape)}, give "
            f"{P_x.dim + 1} numbers of workers: of leading dims, rows and columns"
        )
