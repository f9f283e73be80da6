"""The causal convolution of a split sequence is torch's on each document."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import gpudist
from gpudist.errors import GpudistError, PartitionError
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.nn.compare import assert_block_of, grid, own_block, own_slices, random_like_all
from tests.nn.scan.scan_cases import DOCUMENTS, LENGTH, convolved, ids_of
from tests.nn.scan.test_affine_scan import SIZES, derivatives, sent_bytes
from tests.pool import distributed

SHAPE = (2, 3, LENGTH)


@distributed(ranks=[5, 1, 3, 2, 4])
def test_values_and_two_derivatives(P_world: Partition) -> None:
    for packed, kernel in product((False, True), (1, 4)):
        assert_as_torch(P_world, packed, kernel)


def assert_as_torch(P_world: Partition, packed: bool, kernel: int) -> None:
    P_x, cut = grid(P_world, [1, 1, P_world.size]), {2: SIZES[P_world.size]}
    x, g, seed = [random_like_all(SHAPE, i).requires_grad_() for i in range(3)]
    weight, bias = random_like_all((3, kernel), 4), random_like_all((3,), 5)
    both = [weight.requires_grad_(), bias.requires_grad_()]
    where = own_slices(SHAPE, P_x, cut)
    assert where is not None
    ids = ids_of(DOCUMENTS, 1).expand(2, LENGTH)[:, where[2]] if packed else None
    own_x, own_g, own_seed = [own_block(each, P_x, cut) for each in (x, g, seed)]
    # A parameter of the first worker, copied to all.
    P_one = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition([1])
    line = P_world.create_cartesian_topology_partition([P_world.size])
    owned = [
        p.detach().clone().requires_grad_() if P_one.active
        else gpudist.zero_volume_tensor(dtype=p.dtype, requires_grad=True) for p in both
    ]  # fmt: skip
    copies = [gpudist.broadcast(p, P_one, line, shape="dynamic") for p in owned]
    y = gpudist.causal_conv1d(own_x, copies[0], copies[1], P_x, seq_idx=ids)
    expected = convolved(x, weight, bias, DOCUMENTS if packed else [LENGTH])
    assert_block_of(y.detach(), expected.detach(), where, "output")
    seeds = [random_like_all(p.shape, 6) for p in both]
    own_seeds = [s if P_one.active else s.new_empty(0) for s in seeds]
    found = derivatives(y, [own_x, *owned], own_g, [own_seed, *own_seeds])
    wholes = derivatives(expected, [x, *both], g, [seed, *seeds])
    for i, (own, whole) in enumerate(zip(found, wholes, strict=True)):
        if whole.shape == SHAPE:
            assert_block_of(own, whole, where, f"derivative {i}")
        elif P_one.active:
            torch.testing.assert_close(own, whole)
    kernels = copies[0].detach()
    assert_adjoint(
        lambda x: gpudist.causal_conv1d(x, kernels, None, P_x, seq_idx=ids), own_x.detach(), P_x
    )


@distributed(ranks=4)
def test_channels_may_be_split_too(P_world: Partition) -> None:
    P_x, x = grid(P_world, [1, 2, 2]), random_like_all(SHAPE, 0)
    weight, bias = random_like_all((3, 4), 1), random_like_all((3,), 2)
    where = own_slices(SHAPE, P_x)
    assert where is not None
    y = gpudist.causal_conv1d(x[where], weight[where[1]], bias[where[1]], P_x)
    assert_block_of(y, convolved(x, weight, bias, [LENGTH]), where, "output")


@distributed(ranks=2, transports=["loopback"])
def test_documents_of_one_number_that_are_apart(P_world: Partition) -> None:
    """A document ends where the number changes, though the number comes again."""
    x, weight = random_like_all((1, 1, 6), 0), torch.ones(1, 4, dtype=torch.float64)
    where = own_slices(x.shape, P_x := grid(P_world, [1, 1, 2]))
    assert where is not None
    ids = torch.tensor([[0, 0, 1, 0, 0, 0]])[:, where[2]]
    y = gpudist.causal_conv1d(x[where], weight, None, P_x, seq_idx=ids)
    assert_block_of(y, convolved(x, weight, None, [2, 1, 3]), where, "output")


@distributed(ranks=2, transports=["loopback"])
def test_numbers_of_a_document_stay_in_it(P_world: Partition) -> None:
    x = torch.ones(1, 1, 3)
    x[...] = float("nan") if P_world.rank == 0 else 1.0
    ids = torch.full((1, 3), P_world.rank or 0)
    weight = torch.ones(1, 4, requires_grad=True)
    y = gpudist.causal_conv1d(x, weight, None, grid(P_world, [1, 1, 2]), seq_idx=ids)
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    if P_world.rank == 1:
        assert y.flatten().tolist() == [1, 2, 3]
        assert gradient.flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [3, 50])
@distributed(ranks=3, transports=["host", "loopback"])
def test_bytes_do_not_grow_with_the_length(P_world: Partition, length: int) -> None:
    rank, P_x = P_world.rank or 0, grid(P_world, [1, 1, 3])
    x, weight = torch.rand(2, 5, length), torch.rand(5, 4)
    ids = torch.zeros(2, length, dtype=torch.int32)
    before = after = 0
    for _ in range(2):  # the first call also agrees on the shapes
        before = sent_bytes(P_world)
        gpudist.causal_conv1d(x, weight, None, P_x, seq_idx=ids)
        after = sent_bytes(P_world)
    assert after - before == (2 * 3 * (5 * 4 + 8) if rank < 2 else 0)


@distributed(ranks=2, transports=["loopback"])
def test_workers_outside_and_axes(P_world: Partition) -> None:
    x, weight = torch.rand(2, 3, 4), torch.rand(3, 2)
    P_x = grid(P_world, [1, 1, 1])
    if not P_x.active:
        assert torch.equal(gpudist.causal_conv1d(x, weight, None, P_x), x)
    with pytest.raises(PartitionError, match=r"P_x has shape \[1, 1\]; it needs axes for batch"):
        gpudist.causal_conv1d(x, weight, None, grid(P_world, [1, 1]))


WRONG = {
    "x must have 3 dims": ((3, 4), (3, 2), (3,), (2, 4)),
    "weight must be \\[3, k\\]": ((2, 3, 4), (3, 1, 2), (3,), (2, 4)),
    "bias must be \\[3\\]": ((2, 3, 4), (3, 2), (2,), (2, 4)),
    "seq_idx must be \\[2, 4\\]": ((2, 3, 4), (3, 2), (3,), (2, 5)),
}


@pytest.mark.parametrize("text", WRONG)
@distributed(ranks=2, transports=["loopback"])
def test_one_rank_refuses_for_all(P_world: Partition, text: str) -> None:
    shapes = WRONG[text] if P_world.rank else ((2, 3, 4), (3, 2), (3,), (2, 4))
    x, weight, bias = [torch.rand(shape) for shape in shapes[:3]]
    ids = torch.zeros(shapes[3], dtype=torch.int64)
    with pytest.raises(GpudistError, match=text):
        gpudist.causal_conv1d(x, weight, bias, grid(P_world, [1, 1, 2]), seq_idx=ids)
