"""Launches and bytes of steps are those of the committed rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gpudist
from benchmarks.ledger.__main__ import ROWS, read_rows
from benchmarks.ledger.counting import FREE, Counting
from benchmarks.ledger.gpu_autocast import gpu_autocast
from benchmarks.ledger.page import PAGE, page
from benchmarks.ledger.step import Row, count_step
from gpudist.geometry.boxes import Box
from gpudist.nn.kernel_choice import as_on_gpu
from gpudist.nn.random.cells import Cells, Key, uniform_by_index
from gpudist.sbp.global_parameter import block_of
from gpudist.testing.rank_pool import RankPool
from gpudist.world.partition import Partition
from tests.doubles import use_doubles

NORMS = ("group", "batch", "instance")


@pytest.fixture(autouse=True)
def doubles() -> None:
    use_doubles()


def _untimed(row: Row) -> Row:
    return replace(row, host_us=None, host_us_sequential=None)


@pytest.mark.parametrize("norm", NORMS)
def test_a_step_costs_what_its_row_says(norm: str) -> None:
    case = (f"U-Net, {norm} norm", "bfloat16", "contiguous")
    (expected,) = [
        row for row in read_rows() if (row.network, row.dtype, row.layout, row.ranks) == (*case, 2)
    ]
    with RankPool(2, 60.0) as pool:
        found = pool.run(2, count_step, (*case, 0), {}, 120.0, "nccl")[0]
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


def test_the_kernels_of_gpudist_count_within_the_context_only() -> None:
    with RankPool(2, 60.0) as pool:
        launches = pool.run(2, _launches_of_a_norm, (), {}, 60.0, "nccl")
    assert launches == [3, 3]


def _launches_of_a_norm(P_world: Partition) -> int:
    x = torch.ones(1, 4, 6, 6)
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2, 1])
    norm = gpudist.nn.DistributedGroupNorm(P_x, 2, 4, affine=False)
    norm(x)
    with Counting() as counting:
        norm(x)
    norm(x)
    return counting.counts().by_name["gpudist::launch_norm"][0]


def test_the_page_shows_the_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(read_rows()) == text, "run python -m benchmarks.ledger.page"


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


def test_autocast_casts_by_the_lists_of_cuda() -> None:
    x, weight = torch.ones(2, 4, 8), torch.ones(4, 4, 1)

    def dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.conv1d(x, weight)
            results = (y, F.group_norm(y, 2), y.softmax(1), y.sum(), F.pad(y, (1, 1), "reflect"))
        return [result.dtype for result in results]

    low, single = torch.bfloat16, torch.float32
    before = dtypes()
    with gpu_autocast():
        assert dtypes() == [low, single, single, single, low]
    assert dtypes() == before == [low, low, low, low, single]


def test_native_draws_count() -> None:
    key, shape = Key(torch.tensor(5), torch.tensor(1)), (30, 20)
    with Counting() as counting:
        uniform_by_index(key, Cells(Box.whole(shape), shape), torch.float32, torch.device("cpu"))
    assert counting.counts().by_name["gpudist::draw"] == (1, 4 * 600)


def test_norms_count_with_the_passes_of_their_kernels() -> None:
    norm = torch.nn.GroupNorm(2, 4)
    x = torch.ones(1, 4, 8, 8, requires_grad=True)
    with Counting() as counting:
        y = norm(x)
        y.backward(y.detach())
    by_name = counting.counts().by_name
    assert by_name["native_group_norm"] == (1, 3 * 4 * 4 * 64)
    assert by_name["native_group_norm_backward"] == (1, 5 * 4 * 4 * 64)


_X = torch.arange(6.0)
# A call of each operation that is taken to launch nothing.
_CALLS: dict[str, Any] = {
    "empty": lambda op: op([6]),
    "empty_like": lambda op: op(_X),
    "empty_strided": lambda op: op([6], [1]),
    "new_empty": lambda op: op(_X, [6]),
    "new_empty_strided": lambda op: op(_X, [6], [1]),
    "detach": lambda op: op(_X),
    "alias": lambda op: op(_X),
    "_unsafe_view": lambda op: op(_X, [2, 3]),
    "lift_fresh": lambda op: op(_X),
    "resize_": lambda op: op(torch.empty(0), [6]),
    "set_": lambda op: op(torch.empty(0), _X),
    "is_same_size": lambda op: op(_X, _X),
    "_has_compatible_shallow_copy_type": lambda op: op(_X, _X),
}


@pytest.mark.parametrize("name", sorted(FREE))
def test_what_counts_as_no_launch_writes_no_memory(name: str) -> None:
    before = _X.clone()
    result = _CALLS[name](getattr(torch.ops.aten, name))
    assert torch.equal(_X, before)
    is_new = name.startswith(("empty", "new_empty", "resize"))
    if isinstance(result, torch.Tensor) and not is_new:
        assert result.untyped_storage().data_ptr() == _X.untyped_storage().data_ptr()


def test_padding_launches_few_kernels_which_round_a_gradient_once() -> None:
    with RankPool(2, 60.0) as pool:
        found = {
            kind: pool.run(2, _launches_of_padding, (kind,), {}, 60.0, "nccl")
            for kind in ("Reflection", "Replication", "Circular")
        }
    # Packing, unpacking and the padding.
    assert max(n for ranks in found.values() for rank in ranks for ways in rank for n in ways) <= 3
    # A converted network leaves each cell on its worker, beside those to reflect or to repeat.
    for kind in ("Reflection", "Replication"):
        assert [of_network for _, of_network in found[kind]] == 2 * [[1, 1]]


def _launches_of_padding(P_world: Partition, kind: str) -> tuple[list[int], list[int]]:
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
    if kind != "Circular":
        assert torch.equal(gradient, expected[:, :, rows].bfloat16())
    return found[0], found[1]
