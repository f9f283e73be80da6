"""Tests of a GPU that a world of one allows: the kernel that copies and adds, and its callers."""

from __future__ import annotations

import pytest
import torch

from gpudist import halo_exchange, ops
from gpudist.errors import ShapeError
from gpudist.world.partition import Partition
from tests.gpu.devices import ON_DOUBLES, require_gpu
from tests.gpu.operators import on_cpu
from tests.gpu.worlds import OneRank

require_gpu()


def every_copy_of_a_cell(P_world: Partition, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One cell, wrapped round to itself twice: three gradients come together in it."""
    P_x = P_world.create_cartesian_topology_partition([1])
    x = torch.zeros(1, dtype=dtype, device=P_world.device, requires_grad=True)
    y = halo_exchange(x, P_x, halo=((1, 1),), periodic=True)
    large = 2048.0 if dtype == torch.float16 else 256.0
    y.backward(torch.tensor([1.0, large, 1.0]).to(dtype).to(P_world.device))
    assert x.grad is not None
    return on_cpu(gradient=x.grad, expected=torch.tensor([large + 2.0]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_gradients_are_summed_in_float32(one_rank: OneRank, dtype: torch.dtype) -> None:
    """In 16 bits, adding one to the large number would not change it."""
    (found,) = one_rank.run(every_copy_of_a_cell, dtype=dtype)
    assert torch.equal(found["gradient"], found["expected"])


def many_cells(P_world: Partition) -> None:
    """More cells than 32 bits of bytes, and a box in the middle that is not contiguous."""
    P_x = P_world.create_cartesian_topology_partition([1, 1])
    rows, columns = 70_000, 65_536
    x = torch.empty(rows, columns, dtype=torch.uint8, device=P_world.device)
    x.copy_(torch.arange(columns, device=x.device).remainder(251))
    x += torch.arange(rows, device=x.device).remainder(5)[:, None].to(torch.uint8)
    y = halo_exchange(x, P_x, halo=((2, 1), (1, 3)), periodic=True)
    assert y.shape == (rows + 3, columns + 4)
    assert torch.equal(y[2:-1, 1:-3], x)
    assert torch.equal(y[:2, 1:-3], x[-2:]) and torch.equal(y[-1:, 1:-3], x[:1])
    assert torch.equal(y[2:-1, :1], x[:, -1:]) and torch.equal(y[2:-1, -3:], x[:, :3])
    assert torch.equal(y[:2, -3:], x[-2:, :3]) and torch.equal(y[-1:, :1], x[:1, -1:])


def test_more_than_four_gigabytes(one_rank: OneRank) -> None:
    if ON_DOUBLES or torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs a GPU of 24 GiB")
    one_rank.run(many_cells)


def with_a_tensor_elsewhere(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1])
    elsewhere = "cpu" if P_world.device.type == "cuda" else "meta"
    text = f"on (another device|{elsewhere}) but the partition's device is {P_world.device}"
    with pytest.raises(ShapeError, match=text):
        halo_exchange(torch.ones(3, device=elsewhere), P_x, halo=((1, 1),))


def test_a_tensor_on_another_device_is_refused() -> None:
    world = OneRank()  # its own: a refusal ends it
    world.run(with_a_tensor_elsewhere)
    world.close()


def memory(P_world: Partition) -> dict[str, list[list[float]]]:
    a = torch.tensor([2.0, 3.0], device=P_world.device, requires_grad=True)
    b = torch.tensor([5.0, 7.0], device=P_world.device, requires_grad=True)
    found = {"clear": [ops.clear(a).tolist()]}
    for operator in (ops.add, ops.add_adjoint, ops.copy, ops.copy_adjoint, ops.move):
        first, second = operator(a, b)
        gradients = torch.autograd.grad((first * 3 + second).sum(), (a, b))
        found[operator.__name__] = [x.tolist() for x in (first, second, *gradients)]
    return found


def test_operators_on_memory(one_rank: OneRank) -> None:
    assert one_rank.run(memory) == [
        {
            "clear": [[0, 0]],
            "add": [[2, 3], [7, 10], [4, 4], [1, 1]],
            "add_adjoint": [[7, 10], [5, 7], [3, 3], [4, 4]],
            "copy": [[2, 3], [2, 3], [4, 4], [0, 0]],
            "copy_adjoint": [[7, 10], [0, 0], [3, 3], [3, 3]],
            "move": [[0, 0], [2, 3], [1, 1], [0, 0]],
        }
    ]
