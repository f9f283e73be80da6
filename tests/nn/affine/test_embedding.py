"""The distributed embedding is the sequential one, however the table is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist.errors import GpudistError, PartitionError, ShapeError
from gpudist.nn import DistributedEmbedding
from gpudist.world.partition import Partition
from tests.nn.affine.embedding_cases import (
    Partitions,
    check_embedding,
    indices_of,
    owned_by,
    world_grid,
)
from tests.nn.compare import grid, own_block, own_slices, random_like_all
from tests.pool import distributed

Grids = tuple[Sequence[int], Sequence[int] | None, Sequence[int] | None]
Ranks = tuple[Sequence[int] | None, Sequence[int] | None, Sequence[int] | None]
F64 = torch.float64
ALL = (None, None, None)
CASES: dict[str, tuple[Grids, Ranks]] = {
    "both": (((1, 1), (1, 1, 2), (3, 2)), ([5], [6, 0], [1, 2, 3, 4, 5, 6])),
    "batch and rows": (((2, 1), (2, 1, 1), (2, 1, 3, 1)), ([6, 1], [0, 7], [7, 1, 2, 5, 4, 3])),
}


def partitions_of(P_world: Partition, grids: Grids, ranks: Ranks) -> Partitions:
    P_x, P_y, P_w = (world_grid(P_world, g, r) for g, r in zip(grids, ranks, strict=True))
    assert P_x is not None
    return P_x, P_y, P_w


@pytest.mark.parametrize("options", [{"shape": "dynamic"}, {"global_shape": (4, 5)}])
@distributed(ranks=5, transports=["loopback"])
def test_other_agreements(P_world: Partition, options: dict[str, Any]) -> None:
    partitions = partitions_of(P_world, ((2, 1), (2, 1, 1), (2, 1, 2, 1)), ALL)
    indices = [indices_of((4, 5), 7)]
    if "shape" in options:
        indices.append(indices_of((3, 2), 7))
    check_embedding(partitions, (7, 3), indices, layer_options=options)


@distributed(ranks=4, transports=["loopback"])
def test_a_frozen_table(P_world: Partition) -> None:
    for grids in (((2,), None, None), ((1,), (1, 2), (2, 2))):
        partitions = partitions_of(P_world, grids, ALL)
        check_embedding(partitions, (7, 3), [indices_of((4,), 7)], _freeze=True)


@pytest.mark.parametrize("case", ["both", "batch and rows"])
@distributed(ranks=8, transports=["loopback"])
def test_double_backward(P_world: Partition, case: str) -> None:
    partitions = partitions_of(P_world, *CASES[case])
    P_x, P_y, P_w = partitions
    assert P_y is not None and P_w is not None
    torch.manual_seed(1)
    sequential = torch.nn.Embedding(7, 3, dtype=F64)
    torch.manual_seed(1)
    layer = DistributedEmbedding(P_x, P_y, P_w, 7, 3, dtype=F64)
    indices = indices_of((4, 3), 7)
    where = own_slices((4, 3, 3), P_y)
    whole = random_like_all((4, 3, 3), 2).requires_grad_()
    mine = own_block(whole.detach(), P_y)
    for module, x, factor in (
        (sequential, indices, whole),
        (layer, own_block(indices, P_x, requires_grad=False), mine),
    ):
        y = module(x)
        if y.requires_grad:
            cotangent = factor if y.numel() else factor.reshape(-1)[:0].sum() + y.detach()
            (gradient,) = torch.autograd.grad(y, module.weight, cotangent, create_graph=True)
            gradient.pow(3).sum().backward()
    assert whole.grad is not None
    if where is not None:
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, whole.grad[where], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("index", [7, -1])
@pytest.mark.parametrize("grids", [((2,), None, None), ((2,), (2, 1), (2, 2, 1))])
@distributed(ranks=4, transports=["loopback", "host"])
def test_an_index_out_of_range_is_refused_everywhere(
    P_world: Partition, grids: Grids, index: int
) -> None:
    P_x, P_y, P_w = partitions_of(P_world, grids, ALL)
    others = () if P_y is None else (P_y, P_w)
    layer = DistributedEmbedding(P_x, *others, 7, 3)  # pyright: ignore
    x = indices_of((4,), 7)
    x[3] = index
    with pytest.raises(GpudistError, match=f"index {index} must be from 0 to 6"):
        layer(own_block(x, P_x, requires_grad=False))
        P_world.barrier()


@distributed(ranks=4, transports=["loopback"])
def test_what_is_not_supported_is_refused(P_world: Partition) -> None:
    P_1, P_2, P_y, P_w = (grid(P_world, shape) for shape in ([1], [2], [1, 2], [2, 2]))
    refused: list[dict[str, Any]] = [
        {"max_norm": 1.0},
        {"scale_grad_by_freq": True},
        {"sparse": True},
        {"_weight": torch.zeros(7, 3)},
    ]
    for options in refused:
        with pytest.raises(ShapeError, match=f"DistributedEmbedding: {next(iter(options))} is not"):
            DistributedEmbedding(P_1, 7, 3, **options)
    with pytest.raises(ShapeError, match="padding_idx 7 must be from -7 to 6"):
        DistributedEmbedding(P_1, 7, 3, 7)
    with pytest.raises(PartitionError, match=r"P_w has shape \[2, 2\] but must be \[2, 'any', 1\]"):
        DistributedEmbedding(P_2, grid(P_world, [2, 1]), P_w, 7, 3)
    with pytest.raises(PartitionError, match=r"P_y has shape \[1, 2\] but must be \[2, 'any'\]"):
        DistributedEmbedding(P_2, P_y, grid(P_world, [2, 1, 2]), 7, 3)
    with pytest.raises(ShapeError, match="2 blocks but only 1 embeddings"):
        DistributedEmbedding(P_1, P_y, P_w, 1, 3)
    with pytest.raises(ShapeError, match="2 blocks but only 1 dims"):
        DistributedEmbedding(P_1, P_y, P_w, 7, 1)
    with pytest.raises(ShapeError, match="float32 but must be int64"):
        DistributedEmbedding(grid(P_world, [4]), 7, 3)(torch.zeros(2))
    layer = DistributedEmbedding(P_w, grid(P_world, [2, 2, 1]), grid(P_world, [2, 2, 1, 1]), 7, 3)
    with pytest.raises(ShapeError, match=r"indices have 1 dims but P_x of shape \[2, 2\] has 2"):
        layer(torch.zeros(2, dtype=torch.int64))


@distributed(ranks=4, transports=["host"])
def test_compiled_and_in_forward_mode(P_world: Partition) -> None:
    partitions = partitions_of(P_world, ((1,), (1, 1), (2, 1)), ([3], [0], [1, 2]))
    P_x, P_y, P_w = partitions
    assert P_y is not None and P_w is not None
    torch.manual_seed(1)
    whole = torch.nn.Embedding(7, 3, dtype=F64).weight
    torch.manual_seed(1)
    layer = DistributedEmbedding(P_x, P_y, P_w, 7, 3, 2, dtype=F64)
    x = own_block(indices_of((5,), 7), P_x, requires_grad=False)
    torch.compiler.reset()
    results: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
        layer.zero_grad()
        y = function(x)
        y.pow(2).sum().backward()
        gradient = layer.weight.grad
        results.append((y.detach(), None if gradient is None else gradient.clone()))
    torch.testing.assert_close(results[0], results[1])

    def of_table(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    where = owned_by(partitions)("weight", whole.shape)
    t = random_like_all((7, 3), 4)
    tangent = torch.zeros(0, dtype=F64) if where is None else t[where]
    moved: Any = torch.func.jvp(of_table, (layer.weight.detach(),), (tangent,))
    if P_y.active:
        torch.testing.assert_close(moved[1], t[indices_of((5,), 7)])
