"""Placements and partitions, DeviceMesh, and DTensor both ways, with gradients by its rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from gpudist.errors import PartitionError, ShapeError
from gpudist.sbp import GlobalTensor, Placement, from_dtensor, to_dtensor
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, global_of
from tests.sbp.parts import B, P, S, random
from tests.torchs_group import torchs_group


@distributed(ranks=4, transports=("loopback",))
def test_partitions_and_placements(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([3, 1]).create_cartesian_topology_partition([2, 1])
    placement = Placement.of(P_x)
    assert isinstance(placement, Placement)
    assert placement.ranks.tolist() == [[3], [1]] and placement.type == "cpu"
    assert placement.to_partition() == P_x
    mesh = DeviceMesh("cpu", [[3], [1]], _init_backend=False, _rank=P_world.rank)
    assert Placement.of_mesh(mesh, P_world) == placement
    with pytest.raises(PartitionError, match="init_process_group"):
        placement.to_mesh()


@distributed(ranks=4, transports=("host",), timeout_s=240.0)
def test_there_and_back_shares_memory(P_world: Partition, tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    with torchs_group(P_world, str(tmp_path / "store")):
        placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
        mesh = placement.to_mesh(("rows", "columns"))
        assert Placement.of_mesh(mesh, P_world) == placement
        words = {S(0): Shard(0), S(1): Shard(1), B: Replicate(), P: Partial("sum")}
        # 7 cells over 2 are 4 and 3 by both rules, 3 over 2 are 2 and 1.
        x = random((7, 3))
        for sbp in ((S(0), S(1)), (S(1), B), (P, S(0)), (S(0), S(0))):
            y = global_of(x, placement, sbp)
            z = to_dtensor(y, mesh)
            assert isinstance(z, DTensor) and tuple(z.shape) == (7, 3)
            assert z.placements == tuple(words[one] for one in sbp)
            assert z.to_local().data_ptr() == y.to_local().data_ptr()
            assert z.stride() == x.stride()
            torch.testing.assert_close(z.full_tensor(), x)
            back = from_dtensor(z, P_world)
            assert back.sbp == sbp and back.placement == placement
            assert back.to_local().data_ptr() == y.to_local().data_ptr()
            assert_global(back, x)


@distributed(ranks=4, transports=("host",), timeout_s=240.0)
def test_gradients_by_the_rules_of_both(P_world: Partition, tmp_path: Path) -> None:
    """A product begun by one and ended by the other: both leaves get the sequential gradient."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    with torchs_group(P_world, str(tmp_path / "store")):
        placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
        mesh = placement.to_mesh()
        x, w, v = random((8, 4)), random((4, 6), 1), random((6, 2), 2)
        leaves: list[Any] = [t.clone().requires_grad_() for t in (x, w, v)]
        (leaves[0] @ leaves[1]).tanh().mm(leaves[2]).sum().backward()
        # From DTensor to global tensors: copies on one axis, terms on none.
        a: Any = distribute_tensor(x, mesh, [Replicate(), Shard(0)]).requires_grad_()
        b: Any = distribute_tensor(w, mesh, [Shard(1), Replicate()]).requires_grad_()
        c: Any = global_of(v, placement, (S(0), B), True)
        h: Any = torch.matmul(from_dtensor(a, P_world), from_dtensor(b, P_world)).tanh()
        (h @ c).backward(torch.ones(8, 2, dtype=torch.float64))
        assert a.grad.placements == a.placements and b.grad.placements == b.placements
        assert_global(c.grad, leaves[2].grad)
        torch.testing.assert_close(a.grad.full_tensor(), leaves[0].grad)
        torch.testing.assert_close(b.grad.full_tensor(), leaves[1].grad)
        # From global tensors to DTensor: copies and terms.
        a = global_of(x, placement, (S(0), B), True)
        b = global_of(w, placement, (B, B), True)
        c = distribute_tensor(v, mesh, [Replicate(), Replicate()]).requires_grad_()
        to_dtensor((a @ b).tanh(), mesh).mm(c).sum().backward()
        assert_global(a.grad, leaves[0].grad)
        assert_global(b.grad, leaves[1].grad)
        torch.testing.assert_close(c.grad.full_tensor(), leaves[2].grad)
        terms = global_of(x, placement, (P, B), True)
        z = to_dtensor(terms, mesh)
        assert z.placements == (Partial("sum"), Replicate())
        (z.redistribute(placements=[Replicate(), Replicate()]) * 3).sum().backward()
        assert terms.grad is not None
        assert_global(terms.grad, torch.full_like(x, 3.0))


@distributed(ranks=4, transports=("host",), timeout_s=240.0)
def test_chunks_are_explicit_cuts(P_world: Partition, tmp_path: Path) -> None:
    """Blocks of ``torch.chunk`` that are not balanced: the same memory, without a message."""
    from torch.distributed.tensor import Shard, distribute_tensor

    with torchs_group(P_world, str(tmp_path / "store")):
        placement = Placement("cpu", [0, 1, 2, 3], P_world)
        mesh, x = placement.to_mesh(), random((6, 3))
        leaf: Any = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        before = P_world.wire.recorder.count
        y = from_dtensor(leaf, P_world)
        assert P_world.wire.recorder.count == before and y.sbp == (S(0, [2, 2, 2, 0]),)
        assert y.to_local().data_ptr() == leaf.to_local().data_ptr()
        assert_global(y, x)
        back = to_dtensor(y, mesh)
        assert back.to_local().data_ptr() == leaf.to_local().data_ptr()
        torch.testing.assert_close(back.full_tensor(), x)
        y.square().sum().backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), 2 * x)
        part = global_of(x, placement, (S(0),), True)
        (to_dtensor(part.to_global(sbp=S(0, [2, 2, 2, 0])), mesh) * 3).sum().backward()
        assert part.grad is not None
        assert_global(part.grad, torch.full_like(x, 3.0))
        # 10 cells over 2 are 5 each, and 5 over 2 are 3 and 2 by both rules; 7 are 4 and 3.
        grid = Placement("cpu", [[0, 1], [2, 3]], P_world)
        for extent, sbp in ((10, (S(0), S(0))), (7, (S(0), S(0)))):
            z = distribute_tensor(random((extent,)), grid.to_mesh(), [Shard(0), Shard(0)])
            assert from_dtensor(z, P_world).sbp == sbp
            assert_global(from_dtensor(z, P_world), random((extent,)))


@distributed(ranks=4, transports=("host",), timeout_s=240.0)
def test_what_does_not_fit(P_world: Partition, tmp_path: Path) -> None:
    from torch.distributed.tensor import Partial, Shard

    with torchs_group(P_world, str(tmp_path / "store")):
        placement = Placement("cpu", [0, 1, 2, 3], P_world)
        mesh = placement.to_mesh()
        # 6 cells over 4: 2, 2, 1, 1 here and 2, 2, 2, 0 there.
        message = (
            r"rank 2 holds \[1\] of a global tensor.*but \[2\] of a DTensor.*torch.chunk.*"
            r"use x.to_global\(sbp=\(split\(0, sizes=\[2, 2, 2, 0\]\),\)\) first"
        )
        y = global_of(random((6,)), placement, (S(0),))
        with pytest.raises(ShapeError, match=message):
            to_dtensor(y, mesh)
        with pytest.raises(ShapeError, match=r"rank 0 holds \[0\].*but \[2\] of a DTensor"):
            to_dtensor(y.to_global(sbp=S(0, [0, 6, 0, 0])), mesh)
        whole = to_dtensor(y.to_global(sbp=B), mesh).redistribute(placements=[Shard(0)])
        assert whole.to_local().shape == ((2,) if P_world.rank != 3 else (0,))
        torch.testing.assert_close(whole.full_tensor(), random((6,)))
        with pytest.raises(PartitionError, match=r"mesh has ranks \[0, 1, 2, 3\]"):
            to_dtensor(global_of(random((6,)), Placement("cpu", [1, 0], P_world), (B,)), mesh)
        means: Any = to_dtensor(global_of(random((4,)), placement, (P,)), mesh)
        means._spec.placements = (Partial("avg"),)
        with pytest.raises(PartitionError, match="is not supported"):
            from_dtensor(means, P_world)


@distributed(ranks=4, transports=("host",), timeout_s=240.0)
def test_a_mesh_of_some_ranks(P_world: Partition, tmp_path: Path) -> None:
    """Ranks outside have no cells, on either side; a pending collective is waited for."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with torchs_group(P_world, str(tmp_path / "store")):
        placement = Placement("cpu", [1, 2], P_world)
        mesh = placement.to_mesh()
        x = random((4, 3))
        leaf: Any = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        y = leaf.redistribute(placements=[Replicate()], async_op=True)
        made = from_dtensor(y, P_world)
        assert isinstance(made, GlobalTensor) and type(made.to_local()) is torch.Tensor
        if placement.active:
            (made * 3).backward(torch.ones_like(x))
            torch.testing.assert_close(leaf.grad.full_tensor(), torch.full_like(x, 3.0))
        assert made.to_local().shape == ((4, 3) if placement.active else (0,))
        assert_global(made, x)
        assert to_dtensor(made, mesh).to_local().shape == made.to_local().shape
