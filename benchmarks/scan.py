"""Scans over a split sequence, forward and backward, compared with an all-gather."""

from __future__ import annotations

from math import prod

import torch

import gpudist
from benchmarks.case import Case, Side
from benchmarks.conv import Results, close
from benchmarks.fourier import counted_bytes
from benchmarks.layers import block_of
from gpudist.ops import AllGather
from gpudist.world.partition import Partition

# Shapes of factors and states: batch, sequence, heads, rows and columns of a state.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "a number per head": ((1, 1024, 2, 1, 1), (1, 1024, 2, 16, 16)),
    "a vector per head": ((1, 1024, 2, 16, 1), (1, 1024, 2, 16, 16)),
    "a matrix per head": ((1, 1024, 2, 16, 16), (1, 1024, 2, 16, 16)),
}


def cases(ranks: int) -> list[Case]:
    """Return the cases. Names and ``bytes`` state what all ranks send, ``bytes`` for gpudist."""
    found: list[Case] = []
    for name, (a, b) in CASES.items():
        ours, gathered = sent_bytes(a, b, ranks)
        words = f"{name}, global {list(b)}, sent {ours} B, all-gather {gathered} B"
        parameters = {"a": a, "b": b, "matrix": name == "a matrix per head"}
        found.append(Case("scan", words, ranks, ours, parameters, prod(b) * 4 // ranks))
    return found


def sent_bytes(a: tuple[int, ...], b: tuple[int, ...], ranks: int) -> tuple[int, int]:
    """Return the bytes that all ranks send, forward and backward: gpudist, and an all-gather.

    The length must be divisible by the number of ranks.
    """
    cells, length = prod(a) + prod(b), b[1]
    return 4 * ranks * (ranks - 1) * cells // length, 2 * 4 * (ranks - 1) * cells


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides. The peer scans the whole sequence on every rank."""
    shapes, matrix = (case.parameters["a"], case.parameters["b"]), case.parameters["matrix"]
    P_x = P_world.create_cartesian_topology_partition([1, P_world.size, 1, 1, 1])
    P_one = P_world.create_partition_inclusive([P_world.rank or 0])
    P_one = P_one.create_cartesian_topology_partition([1] * 5)
    torch.manual_seed(0)
    a, b, gy = torch.rand(shapes[0]), torch.randn(shapes[1]), torch.randn(shapes[1])
    if matrix:
        a = a / shapes[0][-1]
    blocks = [block_of(x, P_x).contiguous() for x in (a, b)]
    own_gy = block_of(gy, P_x).contiguous()
    gather = AllGather(P_x, (1,))

    @torch.enable_grad()
    def ours() -> Results:
        leaves = [x.detach().requires_grad_() for x in blocks]
        y = gpudist.affine_scan(leaves[0], leaves[1], P_x, matrix=matrix)
        return y.detach(), *torch.autograd.grad(y, leaves, own_gy)

    @torch.enable_grad()
    def gathered() -> Results:
        leaves = [x.detach().requires_grad_() for x in blocks]
        wholes = [gather(x) for x in leaves]
        y = block_of(gpudist.affine_scan(wholes[0], wholes[1], P_one, matrix=matrix), P_x)
        return y.detach(), *torch.autograd.grad(y, leaves, own_gy)

    leaves = [x.double().requires_grad_() for x in (a, b)]
    with torch.enable_grad():
        y = step_by_step(leaves[0], leaves[1], matrix)
        found = (y.detach(), *torch.autograd.grad(y, leaves, gy.double()))
    expected = [block_of(x.float(), P_x) for x in found]
    bytes_of = sent_bytes(*shapes, P_world.size)

    def side(call: object, nbytes: int) -> Side:
        assert callable(call)

        def is_right(results: Results) -> bool:
            near = all(close(x, whole) for x, whole in zip(results, expected, strict=True))
            return counted_bytes(call, P_world) == nbytes and near

        return Side(call, is_right)

    return {"gpudist": side(ours, bytes_of[0]), "all-gather": side(gathered, bytes_of[1])}


def step_by_step(a: torch.Tensor, b: torch.Tensor, matrix: bool) -> torch.Tensor:
    states = [b[:, 0]]
    for t in range(1, b.shape[1]):
        old = states[-1]
        states.append((a[:, t] @ old if matrix else a[:, t] * old) + b[:, t])
    return torch.stack(states, 1)
