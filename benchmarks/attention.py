"""Attention over a split sequence, forward and backward, with and without messages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from benchmarks.case import Case, Side
from benchmarks.conv import Results, close
from benchmarks.layers import are_close, block_of, both_ways, in_double
from gpudist import all_to_all_attention, ring_attention
from gpudist.nn import DistributedMultiheadAttention
from gpudist.world.partition import CartesianPartition, Partition

SHAPE = (1, 8, 1024, 64)  # batch, heads, sequence, features
TOKENS = (512, 2, 256)  # sequence, batch, features
HEADS = 8
FUNCTIONS = {"ring": ring_attention, "all-to-all": all_to_all_attention}


def cases(ranks: int) -> list[Case]:
    """Return the cases.

    Shapes are global and split along the sequence; bytes are a rank's block of queries.
    """
    found: list[Case] = []
    for name, shape in (*((name, SHAPE) for name in FUNCTIONS), ("multi-head layer", TOKENS)):
        words = ",".join(map(str, shape))
        parameters = {"what": name, "shape": shape}
        block = prod(shape) * 4 // ranks
        found.append(Case("attention", f"{name}, global [{words}]", ranks, block, parameters))
    return found


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides. The peer has all keys and values on every rank but only its own queries."""
    what, shape = case.parameters["what"], case.parameters["shape"]
    torch.manual_seed(0)
    if what in FUNCTIONS:
        P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size, 1])
        return _functions(what, shape, P_x)
    P_x = P_world.create_cartesian_topology_partition([P_world.size, 1, 1])
    return _layer(shape, P_x)


def _functions(what: str, shape: tuple[int, ...], P_x: CartesianPartition) -> dict[str, Side]:
    whole = [torch.rand(shape) - 0.5 for _ in range(3)]
    gy = torch.rand(shape) - 0.5
    y, *gradients = _attend([each.double() for each in whole], gy.double())
    expected = [block_of(each.float(), P_x) for each in (y, *gradients)]
    own, own_gy = [block_of(each, P_x) for each in whole], block_of(gy, P_x)
    there = [own[0], *whole[1:]]
    alone = _attend(there, own_gy)

    @torch.enable_grad()
    def ours() -> Results:
        leaves = [each.detach().requires_grad_() for each in own]
        query, key, value = leaves
        y = FUNCTIONS[what](query, key, value, P_x)
        return y.detach(), *torch.autograd.grad(y, leaves, own_gy)

    return {
        "gpudist": Side(ours, lambda results: _all_close(results, expected)),
        "local torch": Side(
            lambda: _attend(there, own_gy),
            lambda results: _all_close(results, alone),
        ),
    }


@torch.enable_grad()
def _attend(tensors: Sequence[torch.Tensor], gy: torch.Tensor) -> Results:
    leaves = query, key, value = [each.detach().requires_grad_() for each in tensors]
    y = F.scaled_dot_product_attention(query, key, value)
    return y.detach(), *torch.autograd.grad(y, leaves, gy)


def _all_close(results: Results, expected: Results | list[torch.Tensor]) -> bool:
    return all(close(a, b) for a, b in zip(results, expected, strict=True))


class _SelfAttention(torch.nn.Module):
    """Multi-head self-attention: one input is query, key and value."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layer(x, x, x, need_weights=False)
        return y


def _layer(shape: tuple[int, ...], P_x: CartesianPartition) -> dict[str, Side]:
    torch.manual_seed(0)
    distributed = _SelfAttention(DistributedMultiheadAttention(P_x, shape[-1], HEADS))
    torch.manual_seed(0)
    sequential = _SelfAttention(torch.nn.MultiheadAttention(shape[-1], HEADS))
    x, gy = torch.rand(shape) - 0.5, torch.rand(shape) - 0.5
    y, gx, *parameters = in_double(sequential, x, gy)
    expected = (block_of(y, P_x), block_of(gx, P_x), *parameters)
    x, gy = block_of(x, P_x), block_of(gy, P_x)
    alone = in_double(sequential, x, gy)
    return {
        "gpudist": Side(
            lambda: both_ways(distributed, x, gy), lambda results: are_close(results, expected)
        ),
        "local torch": Side(
            lambda: both_ways(sequential, x, gy), lambda results: are_close(results, alone)
        ),
    }
