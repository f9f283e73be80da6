"""Launches and bytes of steps are those of the committed rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gpudist
from benchmarks.ledger.__main__ import ROWS, read_rows
from benchmarks.ledger.counting import Counting
from benchmarks.ledger.step import Row, count_step
from gpudist.nn.kernel_choice import as_on_gpu
from gpudist.sbp.global_parameter import block_of
from gpudist.world.partition import Partition
from tests.pool import distributed

NORMS = ("group", "batch", "instance")


def _untimed(row: Row) -> Row:
    return replace(row, host_us=None, host_us_sequential=None)


@distributed(ranks=[2], transports=["nccl"], timeout_s=120.0)
@pytest.mark.parametrize("norm", NORMS)
def test_a_step_costs_what_its_row_says(P_world: Partition, norm: str) -> None:
    case = (f"U-Net, {norm} norm", "bfloat16", "contiguous")
    (expected,) = [
        row for row in read_rows() if (row.network, row.dtype, row.layout, row.ranks) == (*case, 2)
    ]
    found = count_step(P_world, *case, 0)
    if P_world.rank == 0:
        assert _untimed(found) == _untimed(expected), f"count anew: benchmarks.ledger --json {ROWS}"


def test_small_networks_launch_few_kernels_beside_the_sequential_ones() -> None:
    names = [f"U-Net, {norm} norm" for norm in NORMS]
    known = [*names, "PlainConvUNet", "ResNet-50"]
    rows = [row for row in read_rows() if row.network in known]
    assert {(row.network, row.ranks) for row in rows} >= {(name, 2) for name in names}
    for row in rows:
        most = row.launches_sequential + 4 * (row.halos + row.split_norms) + 20
        assert row.launches <= most, row


def test_a_large_unet_moves_few_bytes_beside_its_copies_of_blocks() -> None:
    rows = [row for row in read_rows() if row.network == "U-Net, group norm, 128^3"]
    assert {row.dtype for row in rows} == {"float32", "bfloat16"}
    for row in rows:
        most = 1.15 * row.device_bytes_sequential + row.moved_bytes
        assert row.device_bytes - row.copied_bytes <= most, row


@distributed(ranks=[2], transports=["nccl"])
def test_the_kernels_of_gpudist_count_within_the_context_only(P_world: Partition) -> None:
    x = torch.ones(1, 4, 6, 6)
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2, 1])
    norm = gpudist.nn.DistributedGroupNorm(P_x, 2, 4, affine=False)
    norm(x)
    with Counting() as counting:
        norm(x)
    norm(x)
    assert counting.counts().by_name["gpudist::launch_norm"][0] == 3


def test_kernels_count_and_views_do_not() -> None:
    x = torch.ones(4, 6)
    with Counting() as counting:
        y = x.view(6, 4).t()[1:].unsqueeze(0).detach()
        torch.relu(y)
    found = counting.counts()
    assert found.launches == 1
    assert found.size_bytes == 2 * 18 * 4


def test_a_tensor_that_is_overwritten_is_not_read() -> None:
    x = torch.ones(4, 6)
    with Counting() as counting:
        torch.empty_like(x).copy_(x)
        x.zero_()
        x.add_(1)
    by_name = counting.counts().by_name
    assert {name: size for name, (_, size) in by_name.items() if size} == {
        "copy_": 2 * 96, "zero_": 96, "add_": 2 * 96
    }  # fmt: skip


@distributed(ranks=[2], transports=["nccl"])
@pytest.mark.parametrize("kind", ["Reflection", "Replication", "Circular"])
def test_padding_launches_few_kernels_which_round_a_gradient_once(
    P_world: Partition, kind: str
) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2, 1, 1])
    widths = (2, 2, 2, 2, 2, 0)
    padding = getattr(torch.nn, f"{kind}Pad3d")(widths)
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 8, 6, 5).bfloat16().float().requires_grad_()
    (expected,) = torch.autograd.grad(padding(whole), whole, 2 * padding(whole))
    assert P_world.rank is not None
    rows = slice(4 * P_world.rank, 4 * P_world.rank + 4)
    x = whole.detach().bfloat16()[:, :, rows].requires_grad_()
    found: list[list[int]] = []
    with as_on_gpu():
        layer = getattr(gpudist.nn, f"Distributed{kind}Pad3d")(P_x, widths)
        network = gpudist.distribute(padding, P_x, inputs={"input": "block"})
        for pad in (layer, network):
            pad(x)
            with Counting() as forward:
                y = block_of(pad(x))
            seed = 2 * y.detach()
            torch.autograd.grad(y, x, seed, retain_graph=True)
            with Counting() as backward:
                (gradient,) = torch.autograd.grad(y, x, seed)
            found.append([counting.counts().launches for counting in (forward, backward)])
            torch.testing.assert_close(gradient.float(), expected[:, :, rows], atol=0, rtol=1 / 64)
    # Packing, unpacking and the padding.
    assert max(launches for ways in found for launches in ways) <= 3
    # A converted network leaves each cell on its worker, beside those to reflect or to repeat.
    if kind != "Circular":
        assert found[1] == [1, 1]
        assert torch.equal(gradient, expected[:, :, rows].bfloat16())
