"""Linear layer with its weight split by columns or rows, compared with DTensor's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.case import Case, Side
from benchmarks.conv import Results, close
from benchmarks.peers import dtensor
from gpudist.nn import DistributedLinear
from gpudist.world.partition import Partition

BATCH, FEATURES = 256, 1024


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are the whole input, which is as large as the whole output."""
    whole = BATCH * FEATURES * 4
    block = max(whole, FEATURES * FEATURES * 4 // ranks)
    return [
        Case(
            "linear", f"{cut}-parallel, [{BATCH},{FEATURES}] to {FEATURES} features", ranks, whole,
            {"cut": cut}, block,
        )
        for cut in ("column", "row")
    ]  # fmt: skip


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the output and the gradients of input and weight; no bias.

    Gpudist keeps unsplit tensors on rank 0, DTensor on every rank.
    """
    by_columns = case.parameters["cut"] == "column"
    torch.manual_seed(0)
    x, gy = torch.rand(BATCH, FEATURES) - 0.5, torch.rand(BATCH, FEATURES) - 0.5
    torch.manual_seed(0)
    weight = torch.nn.Linear(FEATURES, FEATURES, bias=False).weight.detach()
    expected = x @ weight.T, gy @ weight, gy.T @ x
    return {
        "gpudist": _ours(P_world, by_columns, x, weight, gy, expected),
        "dtensor": _dtensor(P_world, by_columns, x, weight, gy, expected),
    }


def _ours(
    P_world: Partition,
    by_columns: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    gy: torch.Tensor,
    expected: Results,
) -> Side:
    size, rank = P_world.size, P_world.rank or 0
    P_one = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1])
    P_cut = P_world.create_cartesian_topology_partition([1, size])
    P_x, P_y = (P_one, P_cut) if by_columns else (P_cut, P_one)
    P_w = P_world.create_cartesian_topology_partition([size, 1] if by_columns else [1, size])
    torch.manual_seed(0)
    layer = DistributedLinear(P_x, P_y, P_w, FEATURES, FEATURES, bias=False)

    def on(P: Partition, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of a tensor whose columns are split over ``P``."""
        return whole.chunk(P.size, 1)[rank].contiguous() if P.active else torch.empty(BATCH, 0)

    x_own, gy_own = on(P_x, x), on(P_y, gy)
    y, gx, gw = expected
    blocks = on(P_y, y), on(P_x, gx), gw.chunk(size, 0 if by_columns else 1)[rank]

    @torch.enable_grad()
    def call() -> Results:
        x = x_own.detach().requires_grad_()
        y = layer(x)
        return (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], gy_own))

    return Side(call, lambda results: _all_close(results, blocks))


def _dtensor(
    P_world: Partition,
    by_columns: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    gy: torch.Tensor,
    expected: Results,
) -> Side:
    mesh = dtensor.mesh(P_world)
    size, rank = P_world.size, P_world.rank or 0
    whole, cut = Replicate(), Shard(1)
    x_cut, y_cut, w_cut = (whole, cut, Shard(0)) if by_columns else (cut, whole, Shard(1))

    def block(tensor: torch.Tensor, placement: Replicate | Shard) -> torch.Tensor:
        if isinstance(placement, Shard):
            tensor = tensor.chunk(size, placement.dim)[rank]
        return tensor.contiguous()

    def placed(tensor: torch.Tensor, placement: Replicate | Shard) -> DTensor:
        return DTensor.from_local(block(tensor, placement), mesh, [placement], run_check=False)

    w, gy_placed = placed(weight, w_cut).requires_grad_(), placed(gy, y_cut)
    x_placed = placed(x, x_cut).requires_grad_()
    y, gx, gw = expected
    blocks = block(y, y_cut), block(gx, x_cut), block(gw, w_cut)

    @torch.enable_grad()
    def call() -> Results:
        product = F.linear(x_placed, w)
        assert isinstance(product, DTensor)
        y = product.redistribute(placements=[y_cut])
        gx, gw = torch.autograd.grad(y, [x_placed, w], gy_placed)
        assert isinstance(gx, DTensor) and isinstance(gw, DTensor)
        # When cut by columns, each rank has a partial sum of the input's gradient.
        gx = gx.redistribute(placements=[x_cut])
        return y.to_local().detach(), gx.to_local(), gw.to_local()

    return Side(call, lambda results: _all_close(results, blocks))


def _all_close(results: Results, expected: Results) -> bool:
    return all(
        close(a, b) if b.numel() else a.numel() == 0 for a, b in zip(results, expected, strict=True)
    )
