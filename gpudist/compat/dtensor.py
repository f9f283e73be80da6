"""DTensor's ``parallelize_module``: the same plans, carried out by tensor-parallel layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from gpudist import nn
from gpudist.errors import ConversionError
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.world.partition import Partition
from gpudist.world.runtime import world

Style = Any


def parallelize_module(
    module: torch.nn.Module,
    P: Partition | DeviceMesh,
    parallelize_plan: Mapping[str, Style] | Style,
) -> torch.nn.Module:
    """Replace layers of ``module`` by tensor-parallel ones, as a plan for DTensor says.

    Values and gradients are those of DTensor's local tensors: what is the same on all workers has
    the whole gradient on each, which tensor-parallel layers call the invariant convention. Weights
    are kept. Blocks are balanced, where DTensor cuts like ``torch.chunk``.

    | style | layer | becomes |
    |---|---|---|
    | ``ColwiseParallel`` | ``Linear`` | :class:`~gpudist.nn.ColumnParallelLinear` |
    | ``RowwiseParallel`` | ``Linear`` | :class:`~gpudist.nn.RowParallelLinear` |
    | ``RowwiseParallel`` | ``Embedding`` | :class:`~gpudist.nn.VocabParallelEmbedding` |
    | ``SequenceParallel`` | any, such as a norm | itself; gradients of its parameters are summed |

    Args:
        module: network, the same on all workers; changed in place.
        P: partition, or mesh of one dim, of the workers that share each layer.
        parallelize_plan: styles of ``torch.distributed.tensor.parallel`` by the name of a module,
            which may be a pattern for each part, such as ``"blocks.*.up"``; or the style of
            ``module`` itself. ``Shard(-1)`` splits features, ``Shard(d)`` the sequence dim.

    Returns:
        ``module``, passed through :func:`~gpudist.nn.fuse_parameter_movements`; or the layer that
        replaces it.

    Raises:
        ConversionError: no module has the name, or a style with its layouts has no counterpart.
    """
    if not isinstance(P, Partition):
        P = world().create_mesh_partition(P)
    if not isinstance(parallelize_plan, Mapping):
        return _parallel(type(module).__name__, module, P, parallelize_plan)
    for pattern, style in parallelize_plan.items():
        names = [name for name, _ in module.named_modules() if name and _matches(name, pattern)]
        if not names:
            raise ConversionError(
                f"parallelize_module: the plan names {pattern!r}, but {type(module).__name__} has "
                "no such module"
            )
        for name in names:
            module.set_submodule(name, _parallel(name, module.get_submodule(name), P, style))
    return nn.fuse_parameter_movements(module, P)


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _parallel(name: str, layer: Any, P: Partition, style: Style) -> torch.nn.Module:
    kind = type(style).__name__
    if kind == "SequenceParallel":
        return layer
    make = _MAKERS.get((kind, type(layer)))
    if make is not None and not style.use_local_output:
        raise ConversionError(
            f"parallelize_module, {name}: use_local_output=False asks for a DTensor; layers of "
            "gpudist return blocks, use_local_output=True"
        )
    made = make(P, layer, *_dims_of(style)) if make is not None else None
    if made is None:
        raise ConversionError(
            f"parallelize_module, {name}: {style} of a {type(layer).__name__} has no counterpart; "
            "see the table of gpudist.compat.dtensor.parallelize_module"
        )
    parameters = dict(layer.named_parameters())
    with torch.no_grad():
        for key, placement in placements(made).items():
            block, box = made.get_parameter(key), placement.own_box
            if box is not None:
                block.copy_(parameters[key][box.slices])
            block.requires_grad_(parameters[key].requires_grad)
    return made


def _dims_of(style: Style) -> list[int | None]:
    # The split dims of input and output, None for whole tensors.
    layouts = style.input_layouts[0], style.output_layouts[0]
    # Layouts that are neither split nor whole get a dim that no layer takes.
    return [getattr(x, "dim", None if x.is_replicate() else -2) for x in layouts]


def _columns(P: Partition, layer: Any, source: int | None, target: int | None) -> Any:
    if (source or 0) < 0 or target not in (None, -1):
        return None
    return nn.ColumnParallelLinear(
        P, *_sizes(layer), gather_output=target is None, sequence_dim=source
    )


def _rows(P: Partition, layer: Any, source: int | None, target: int | None) -> Any:
    if source not in (None, -1) or (target or 0) < 0:
        return None
    return nn.RowParallelLinear(
        P, *_sizes(layer), input_is_parallel=source is not None, sequence_dim=target
    )


def _sizes(layer: torch.nn.Linear) -> tuple[Any, ...]:
    weight = layer.weight
    return (
        layer.in_features, layer.out_features, layer.bias is not None, weight.device, weight.dtype,
    )  # fmt: skip


def _vocabulary(P: Partition, layer: Any, source: int | None, target: int | None) -> Any:
    if source is not None or (target or 0) < 0 or layer.max_norm or layer.sparse:
        return None
    weight = layer.weight
    return nn.VocabParallelEmbedding(
        P, layer.num_embeddings, layer.embedding_dim, layer.padding_idx, weight.device,
        weight.dtype, sequence_dim=target,
    )  # fmt: skip


_MAKERS: dict[tuple[str, type], Callable[..., Any]] = {
    ("ColwiseParallel", torch.nn.Linear): _columns,
    ("RowwiseParallel", torch.nn.Linear): _rows,
    ("RowwiseParallel", torch.nn.Embedding): _vocabulary,
}
