"""Convert a network back to the sequential one."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from gpudist.checks.arguments import checked
from gpudist.convert.converted import conversion_of, undo_conversion
from gpudist.convert.copying import copy_network
from gpudist.convert.parameters import named_tensors
from gpudist.errors import ConversionError
from gpudist.nn.parameters.parameter_placement import (
    ParameterPlacement,
    drop_placements,
    placements,
)
from gpudist.ops import AllSumReduce, SumReduce
from gpudist.sbp.global_parameter import block_of
from gpudist.world.partition import CartesianPartition

_Network = TypeVar("_Network", bound=torch.nn.Module)


@checked(ConversionError)
def sequential(distributed: _Network, root: int | None = None) -> _Network | None:
    """Return the sequential network with the current weights; inverse of :func:`distribute`.

    Collective over the partition passed to :func:`distribute`.

    Args:
        distributed: result of :func:`distribute`.
        root: rank, in that partition, of the worker that receives the network; by default, every
            worker does.

    Returns:
        Network of the original class, on the partition's device; ``None`` on workers that do not
        receive it.

    Cost:
        A copy, and an all-gather of the weights that the plan split.

    Raises:
        ConversionError: ``distributed`` is not the result of :func:`distribute`.
    """
    conversion: Any = conversion_of(distributed)
    if conversion.scope.followed:
        raise ConversionError(
            f"sequential: the forward reaches {sorted(conversion.scope.followed)} by a closure or "
            "a global variable, which would refer to other weights than the returned network; "
            "reach them by attributes of a module, or load the state dict into a new network"
        )
    if not conversion.P_x.active:
        return None
    P_x, placed = conversion.P_x, placements(distributed)
    tensors = dict(named_tensors(distributed))
    wholes = {
        name: _whole_of(block_of(tensors[name].detach(), placed[name]), placed[name], P_x, root)
        for name in placed
    }
    if root is not None and P_x.rank != root:
        return None
    network = copy_network(distributed)
    elsewhere = {id(new): old for old, new in conversion_of(network).parameters.kept_elsewhere()}
    network = undo_conversion(network)
    blocks = dict(network.named_parameters(remove_duplicate=False))
    tied: dict[int, torch.nn.Parameter] = {}
    for name, whole in wholes.items():
        path, _, last = name.rpartition(".")
        layer, block = network.get_submodule(path), blocks[name]
        if id(block) not in tied:
            tied[id(block)] = elsewhere.get(id(block), torch.nn.Parameter(whole))
            tied[id(block)].data = whole
            tied[id(block)].requires_grad_(block.requires_grad)
        layer._parameters[last] = tied[id(block)]
        drop_placements(layer)
    return network


def _whole_of(
    block: torch.Tensor, placement: ParameterPlacement, P_x: CartesianPartition, root: int | None
) -> torch.Tensor:
    """Gather the full tensor from the first owner of each block, on ``root`` or everywhere."""
    whole = torch.zeros(placement.shape, dtype=block.dtype, device=block.device)
    box = placement.own_box
    if box is not None and placement.is_first_copy:
        whole[box.slices] = block
    members = P_x.create_partition_inclusive(range(P_x.size))
    P_line = members.create_cartesian_topology_partition((P_x.size,))
    if root is None:
        return AllSumReduce(P_line, (0,))(whole)
    return SumReduce(P_line, P_x.create_partition_inclusive([root]))(whole)
