"""NumPy arrays through the functional operators: the tensors' numbers, as arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gpudist
from gpudist.errors import PlanMismatch, ShapeError
from gpudist.world.partition import Partition
from tests.ops.dense import partition_of
from tests.pool import distributed

ON_CPU = ["loopback", "host", "nccl"]


def functions(P_world: Partition) -> dict[str, Callable[[Any], Any]]:
    """Every function, on ranks 0 and 1 of three; rank 2 is in some partitions only."""
    P_x, P_y = partition_of(P_world, [0, 1], [1, 2]), partition_of(P_world, [1, 2], [2, 1])
    P_0, P_1 = (P_world.create_partition_inclusive([rank]) for rank in (0, 1))
    return {
        "all_gather": lambda x: gpudist.all_gather(x, P_x, [1]),
        "all_sum_reduce": lambda x: gpudist.all_sum_reduce(x, P_x, [1]),
        "broadcast": lambda x: gpudist.broadcast(x, P_1, P_world),
        "gather": lambda x: gpudist.gather(x, P_x, root=1),
        "halo_exchange": lambda x: gpudist.halo_exchange(x, P_x, halo=((1, 1), (2, 0))),
        "repartition": lambda x: gpudist.repartition(x, P_x, P_y),
        "scatter": lambda x: gpudist.scatter(x, P_x, root=1),
        "send_recv": lambda x: gpudist.send_recv(x, P_0, P_1),
        "sum_reduce": lambda x: gpudist.sum_reduce(x, P_world, P_1),
        "sum_scatter": lambda x: gpudist.sum_scatter(x, P_x, [1]),
    }


NAMES = [
    "all_gather", "all_sum_reduce", "broadcast", "gather", "halo_exchange",
    "repartition", "scatter", "send_recv", "sum_reduce", "sum_scatter",
]  # fmt: skip


def block(P_world: Partition, dtype: str = "float64") -> np.ndarray:
    """Return this rank's block, whose cells differ from all others."""
    assert P_world.rank is not None
    return (np.arange(12.0).reshape(4, 3) + 100 * P_world.rank).astype(dtype)


def assert_array(actual: object, expected: torch.Tensor) -> None:
    assert type(actual) is np.ndarray
    assert actual.flags.writeable
    np.testing.assert_array_equal(actual, expected.numpy(), strict=True)


@pytest.mark.parametrize("name", NAMES)
@distributed(ranks=3, transports=ON_CPU)
def test_functions(P_world: Partition, name: str) -> None:
    function = functions(P_world)[name]
    x = block(P_world)
    before = x.copy()
    expected = function(torch.from_numpy(x.copy()))
    y = function(x)
    assert_array(y, expected)
    assert not np.shares_memory(x, y)
    if y.size:
        y[...] = -1.0
    np.testing.assert_array_equal(x, before)
    assert_array(function(x), expected)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1"])
@distributed(ranks=3, transports=["loopback"])
def test_dtypes(P_world: Partition, dtype: str) -> None:
    function = functions(P_world)["all_sum_reduce"]
    x = block(P_world).astype(dtype)
    assert_array(function(x), function(torch.from_numpy(x.copy())))


@distributed(ranks=3, transports=["loopback"])
def test_truth_values(P_world: Partition) -> None:
    function = functions(P_world)["all_gather"]
    x = block(P_world) % 2 == 0
    assert_array(function(x), function(torch.from_numpy(x.copy())))


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def field(x: np.ndarray) -> np.ndarray:
    """``x`` with strides that are no multiple of its item."""
    records = np.zeros(x.shape, dtype=[("x", x.dtype), ("flag", "i1")])
    records["x"] = x
    return records["x"]


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "read-only": read_only,
    "transposed": lambda x: x.T.copy().T,
    "every other": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "backwards": lambda x: x[::-1].copy()[::-1],
    "a read-only one, backwards": lambda x: read_only(x[::-1, ::-1])[::-1, ::-1],
    "one of a record's": field,
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(ranks=3, transports=["loopback", "host"])
def test_layouts(P_world: Partition, layout: str) -> None:
    x = LAYOUTS[layout](block(P_world))
    before = x.copy()
    for name in ("halo_exchange", "broadcast", "all_sum_reduce"):
        function = functions(P_world)[name]
        expected = function(torch.from_numpy(before.copy()))
        y = function(x)
        assert_array(y, expected)
        assert not np.shares_memory(x, y)
    np.testing.assert_array_equal(x, before)


@distributed(ranks=2, transports=["loopback"])
def test_no_dims(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    assert_array(gpudist.all_sum_reduce(np.array(1.5), P_x, [0]), torch.tensor(3.0).double())


@pytest.mark.parametrize("shape", [(0,), (4, 0)])
@distributed(ranks=2, transports=["loopback", "host"])
def test_placeholders(P_world: Partition, shape: tuple[int, ...]) -> None:
    P_0, P_1 = (P_world.create_partition_inclusive([rank]) for rank in range(2))
    x = block(P_world) if P_world.rank == 0 else np.empty(shape)
    y = gpudist.send_recv(x, P_0, P_1)
    expected = torch.arange(12.0).double().reshape(4, 3) if P_world.rank == 1 else torch.empty(4, 0)
    assert_array(y, expected.double())


@pytest.mark.parametrize("shape", ["dynamic", "static"])
@distributed(ranks=3, transports=["loopback", "host", "gloo"])
def test_none_gives_what_the_root_gave(P_world: Partition, shape: Any) -> None:
    P_x = partition_of(P_world, [1, 2], [2])
    whole = torch.arange(5)
    mine = {1: whole[:3], 2: whole[3:]}.get(P_world.rank or 0)
    for _ in range(2):
        y = gpudist.scatter(whole.numpy() if P_world.rank == 1 else None, P_x, shape=shape)
        if mine is not None:
            assert_array(y, mine)
        else:
            assert type(y) is torch.Tensor and y.numel() == 0
    if shape == "dynamic":
        y = gpudist.scatter(whole if P_world.rank == 1 else None, P_x)
        assert mine is None or (type(y) is torch.Tensor and y.equal(mine))


@distributed(ranks=2, transports=["loopback"])
def test_an_array_gives_an_array_whatever_the_root_gave(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    x: Any = torch.arange(4) if P_world.rank == 0 else np.empty(0)
    y = gpudist.scatter(x, P_x)
    assert isinstance(y, torch.Tensor if P_world.rank == 0 else np.ndarray)
    assert y.tolist() == ([0, 1] if P_world.rank == 0 else [2, 3])


@distributed(ranks=2, transports=["loopback", "host"])
def test_results_are_not_recycled(P_world: Partition) -> None:
    """Large outputs come from memory that earlier ones left behind; these are still in use."""
    assert P_world.rank is not None
    P_x = P_world.create_cartesian_topology_partition([2])
    kept = []
    for value in range(6):
        x = np.full(1 << 20, float(value))
        kept.append(gpudist.all_sum_reduce(x, P_x, [0])[1:])
        del x
    gpudist.empty_cache()
    assert [np.unique(y).tolist() for y in kept] == [[2.0 * value] for value in range(6)]


@distributed(ranks=2, transports=["loopback"])
def test_dtypes_that_do_not_move(P_world: Partition) -> None:
    """Dtypes that torch has but gpudist does not move are refused as for tensors."""
    P_x = P_world.create_cartesian_topology_partition([2])
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"dtype .*cannot be moved"):
            gpudist.all_gather(np.zeros(2, "u4"), P_x, [0])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "long double": (lambda: np.zeros(2, "g"), "AllGather: torch cannot read a NumPy .*float"),
    "foreign bytes": (lambda: np.zeros(2, ">f4"), "of dtype >f4: .*byte order"),
    "objects": (lambda: np.zeros(2, "O"), "cannot read .* dtype object"),
    "texts": (lambda: np.zeros(2, "U3"), "cannot read .* dtype <U3"),
    "dates": (lambda: np.zeros(2, "M8[s]"), "cannot read .* dtype datetime64"),
    "records": (lambda: np.zeros(2, [("a", "f8")]), "cannot read .* dtype .*a.*f8"),
    "masked": (lambda: np.ma.zeros(2), "is a numpy.ma.*MaskedArray; .* without a mask"),
    "a scalar": (lambda: np.float64(1.0), "is a numpy.float64; it must be a torch tensor"),
    "a list": (lambda: [1.0, 2.0], "AllGather: the input is a builtins.list"),
}


@pytest.mark.parametrize("what", REFUSED)
@distributed(ranks=2, transports=["loopback"])
def test_refused(P_world: Partition, what: str) -> None:
    make, message = REFUSED[what]
    P_x = P_world.create_cartesian_topology_partition([2])
    with pytest.raises(ShapeError, match=message):
        gpudist.all_gather(make(), P_x, [0])


@distributed(ranks=2, transports=["loopback", "host"])
def test_who_waits_for_a_rejected_call_ends_with_the_next_message(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    gpudist.all_gather(np.zeros(2), P_x, [0])
    if P_world.rank == 0:
        with pytest.raises(ShapeError, match=r"cannot read .* dtype object"):
            gpudist.all_gather(np.zeros(2, "O"), P_x, [0])
    with pytest.raises(PlanMismatch):
        if P_world.rank == 1:
            gpudist.all_gather(np.zeros(2), P_x, [0])
        P_world.barrier()


@distributed(ranks=2, transports=["loopback"])
def test_other_dtypes_than_the_owners(P_world: Partition) -> None:
    """NumPy has no bfloat16: the worker that would return such an array raises."""
    P_0, P_1 = (P_world.create_partition_inclusive([rank]) for rank in range(2))
    if P_world.rank == 0:
        gpudist.send_recv(torch.ones(2, dtype=torch.bfloat16), P_0, P_1)
    else:
        with pytest.raises(ShapeError, match=r"not have the output's dtype torch.bfloat16"):
            gpudist.send_recv(np.empty(0), P_0, P_1)


@distributed(ranks=2, transports=["loopback"])
def test_blocks_that_changed(P_world: Partition) -> None:
    """Arrays are agreed on like tensors."""
    P_x = P_world.create_cartesian_topology_partition([2])
    gpudist.all_gather(np.zeros(2), P_x, [0])
    with pytest.raises(PlanMismatch, match=r"\[2\] and is now \[3\]"):
        gpudist.all_gather(np.zeros(3), P_x, [0])


@distributed(ranks=2, transports=["loopback"])
def test_no_gradient_comes_to_an_array(P_world: Partition) -> None:
    """Nor does a worker's array need one where another's tensor does."""
    P_x = P_world.create_cartesian_topology_partition([2])
    x: Any = torch.ones(2).requires_grad_() if P_world.rank == 0 else np.ones(2, "f4")
    y = gpudist.all_gather(x, P_x, [0])
    assert y.requires_grad if isinstance(y, torch.Tensor) else P_world.rank == 1
