"""Tensor-parallel layers: a network compared with DTensor's, and linear layers with overlap."""

from __future__ import annotations

import torch

from benchmarks import transformer
from benchmarks.case import Case, Side
from benchmarks.conv import close
from benchmarks.layers import both_ways, in_double
from gpudist.nn import ColumnParallelLinear, RowParallelLinear
from gpudist.world.partition import Partition

SIZES = ((256, 256), (1024, 1024))
LAYERS = {"column": ColumnParallelLinear, "row": RowParallelLinear}


def cases(ranks: int) -> list[Case]:
    """Return the cases.

    Tokens are summed over ranks; linear layers have equal features in and out.
    """
    found = transformer.cases(ranks)
    for tokens, features in SIZES:
        block = tokens * features * 4 // ranks
        for layer in LAYERS:
            name = f"{layer}-parallel, {tokens} tokens, {features} features"
            parameters = {"layer": layer, "tokens": tokens, "features": features}
            found.append(Case("tensor_parallel", name, ranks, block, parameters, block))
    return found


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; a linear layer has no bias.

    Its results are the output and the gradients of input and weight.
    """
    if "network" in case.parameters:
        return transformer.sides(case, P_world)
    features, size, rank = case.parameters["features"], P_world.size, P_world.rank or 0
    by_columns = case.parameters["layer"] == "column"
    torch.manual_seed(0)
    sequential = torch.nn.Linear(features, features, bias=False)
    x, gy = (torch.rand(case.parameters["tokens"], features) - 0.5 for _ in range(2))
    y, gx, gw = in_double(sequential, x, gy)
    # Column-parallel: input split by tokens, output by features; row-parallel: the reverse.
    x_dim, y_dim, w_dim = (0, 1, 0) if by_columns else (1, 0, 1)

    def own(whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(size, dim)[rank].clone()

    expected = own(y, y_dim), own(gx, x_dim), own(gw, w_dim)
    x, gy = own(x, x_dim), own(gy, y_dim)

    def side(overlap: bool) -> Side:
        torch.manual_seed(0)
        layer = LAYERS[case.parameters["layer"]](
            P_world, features, features, bias=False, sequence_dim=0, overlap=overlap
        )
        return Side(
            lambda: both_ways(layer, x, gy),
            lambda results: all(close(a, b) for a, b in zip(results, expected, strict=True)),
        )

    return {"gpudist": side(False), "block by block": side(True)}
