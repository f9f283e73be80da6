"""Behaviour specific to NCCL, over the doubles of CUDA and NCCL."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpudist import ops, zero_volume_tensor
from gpudist.errors import TransportError
from gpudist.geometry.boxes import Box, Collective, Move, Stage
from gpudist.transport.failure.channel import Failure
from gpudist.transport.nccl.stages import collectives_by_messages, collectives_by_nccl, lower
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.transport.nccl.verbs import NcclCommunicator
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests import warm
from tests.doubles import use_doubles
from tests.ops.dense import assert_same, random
from tests.pool import distributed

BROADCAST = Collective("broadcast", (0, 1, 2), 1, True)
REDUCE = Collective("reduce", (0, 1, 2), 1, False)
SUM = Collective("all_reduce", (0, 1, 2), 0, True)


def carried_out(collective: Collective, rank: int, strides: tuple[int, ...], **options: Any) -> Any:
    has_input = collective.kind != "broadcast" or rank == collective.root
    has_output = collective.kind != "reduce" or rank == collective.root
    stage = Stage(
        (4, 6) if has_input else None, (4, 6) if has_output else None, collectives=(collective,)
    )
    dtype = options.pop("dtype", torch.float32)
    return lower(stage, [5, 6, 7], rank, strides if has_input else (), dtype, **options)


def test_a_contiguous_block_is_given_and_taken_where_it_lies() -> None:
    lowered = carried_out(SUM, 2, (6, 1), accumulates=False)
    (step,) = lowered.steps
    assert (step.kind, step.members, step.count, step.dtype) == (
        "all_reduce",
        (5, 6, 7),
        24,
        "float32",
    )
    assert (step.source, step.target) == ("input", "output")
    assert (lowered.before, lowered.sent_bytes, lowered.received_bytes) == ([], 0, 0)
    assert [job.there for job in lowered.after] == [True]


def test_a_strided_block_is_packed() -> None:
    lowered = carried_out(BROADCAST, 1, (1, 4), accumulates=False)
    (step,), (packing,) = lowered.steps, lowered.before
    assert (step.kind, step.peer, step.source, step.target) == ("broadcast", 1, "sent", "output")
    assert (packing.summands[0].strides, packing.destination.strides) == ((1, 4), (6, 1))
    assert lowered.sent_bytes >= 4 * 6 * 4


def test_a_root_that_adds_nothing_gives_zeros() -> None:
    lowered = carried_out(REDUCE, 1, (6, 1), accumulates=False)
    (zeros,) = lowered.before
    assert zeros.summands == () and not zeros.there
    assert [step.source for step in lowered.steps] == ["sent"]


def test_what_is_added_to_an_output_arrives_beside_it() -> None:
    lowered = carried_out(SUM, 0, (6, 1), accumulates=True)
    (job,) = lowered.after
    assert [view.buffer for view in job.summands] == ["output", "received"]


def test_complex_numbers_are_reduced_as_pairs() -> None:
    lowered = carried_out(SUM, 0, (6, 1), accumulates=False, dtype=torch.complex64)
    assert [(step.count, step.dtype) for step in lowered.steps] == [(48, "float32")]


def test_what_a_collective_makes_is_all_there_is() -> None:
    half = Box((0, 0), (2, 6))
    stage = Stage((4, 6), (4, 6), moves=(Move(half, half),), collectives=(SUM,))
    with pytest.raises(TransportError, match="filled by a collective also copies boxes"):
        lower(stage, [5, 6, 7], 0, (6, 1), torch.float32, accumulates=False)


@pytest.mark.parametrize("in_rank_order", [False, True])
@distributed(ranks=2, transports=["nccl"])
def test_complex_numbers_have_a_sum_alone(P_world: Partition, in_rank_order: bool) -> None:
    z = torch.full((2,), 1 + 2j)
    output = torch.empty_like(z)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P_world.wire, "in_rank_order", in_rank_order)
        with pytest.raises(TransportError, match="complex numbers support sum over NCCL, not prod"):
            P_world.communicator.all_reduce(z, output, "prod")
        P_world.communicator.all_reduce(z, output)
    assert output.tolist() == [2 + 4j] * 2


@distributed(ranks=2, transports=["nccl"])
def test_numbers_that_nccl_cannot_add_are_refused(P_world: Partition) -> None:
    x = torch.ones(4).to(torch.float8_e4m3fn)
    with pytest.raises(TransportError, match=r"NCCL does not reduce torch\.float8_e4m3fn; conv"):
        P_world.communicator.all_reduce(x, torch.empty_like(x))


@pytest.mark.parametrize(
    ("collective", "dtype", "expected"),
    [
        (SUM, torch.float32, True),
        (SUM, torch.int16, False),
        (BROADCAST, torch.int16, True),
        (Collective("all_reduce", (0, 1), 0, True), torch.float32, True),
        (Collective("reduce", (0, 1), 0, True), torch.float32, False),
    ],
)
def test_whose_collective(collective: Collective, dtype: torch.dtype, expected: bool) -> None:
    assert collectives_by_nccl(collective, dtype) is expected
    assert not collectives_by_messages(collective, dtype)


def as_messages(P_world: Partition) -> Partition:
    """The same world, in which no collective is NCCL's own."""
    assert isinstance(P_world.wire, NcclTransport)
    P_world.wire.strategy = collectives_by_messages
    return P_world


@distributed(ranks=4, transports=["nccl"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16], ids=str)
def test_collectives_as_messages(P_world: Partition, dtype: torch.dtype) -> None:
    """Sums have the bits of ascending rank order, 16-bit ones made in float32."""
    P_x = as_messages(P_world).create_cartesian_topology_partition([4])
    parts = [(random((2, 5), seed=rank) * 100).to(dtype) for rank in range(4)]
    x = parts[P_x.rank or 0]
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = parts[0].to(wide)
    for part in parts[1:]:
        expected = expected + part.to(wide)
    assert_same(ops.all_sum_reduce(x, P_x, [0]), expected.to(dtype))
    root = P_world.create_partition_inclusive([2])
    mine = x if root.active else zero_volume_tensor()
    assert_same(ops.broadcast(mine.to(dtype), root, P_world), parts[2])


@distributed(ranks=4, transports=["nccl"])
def test_split(P_world: Partition) -> None:
    """Every rank of the parent calls it, and each color has a communicator of its own."""
    wire = P_world.wire
    everyone = wire.communicator(range(4))
    for _ in range(2):
        part = wire.split(everyone, [0, 1, 0, 1], [3, 2, 1, 0])
        assert isinstance(part, NcclCommunicator)
        assert part.members == ((2, 0) if wire.rank % 2 == 0 else (3, 1))
        x, total = torch.tensor([float(wire.rank)]), torch.empty(1)
        part.all_reduce(x, total)
        wire.wait()
        assert total.item() == (2.0 if wire.rank % 2 == 0 else 4.0)


@distributed(ranks=4, transports=["nccl"])
def test_mesh(P_world: Partition) -> None:
    mesh = DeviceMesh(
        "cpu", torch.tensor([[0, 2], [1, 3]]), _init_backend=False, _rank=P_world.rank
    )
    P_x = P_world.create_mesh_partition(mesh)
    assert (P_x.shape, P_x.ranks) == ((2, 2), (0, 2, 1, 3))
    assert ops.all_sum_reduce(torch.tensor([float(P_world.rank or 0)]), P_x, [0]).item() == (
        1.0 if P_world.rank in (0, 1) else 5.0
    )


@distributed(ranks=2, transports=["nccl"])
def test_a_forked_child_has_no_part_in_the_world(P_world: Partition) -> None:
    """A forked child raises, and what it closes stays open in its parent."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        said = "no error"
        try:
            P_world.wire.abort(Failure("PeerFailure", 1, "not a failure of the world's"))
            P_world.wire.close()
            P_world.barrier()
        except TransportError as error:
            said = str(error)
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert f"process {child} was forked from rank {P_world.rank}" in file.read().decode()
    assert os.waitpid(child, 0) == (child, 0)
    P_world.barrier()


def test_world_of_one() -> None:
    """No NCCL is needed where nothing is exchanged."""
    use_doubles()
    wire = runtime.connect("nccl", dist.HashStore(), 0, 1, 20.0, "alone")
    P_x = runtime.world_of(wire).create_cartesian_topology_partition([1, 1])
    x = random((4, 5)).requires_grad_()
    halo = ops.HaloExchange(P_x, halo=((1, 1), (2, 0)), periodic=(True, False))
    y = halo(x)
    expected = torch.cat([x[-1:], x, x[:1]])
    assert_same(y[:, 2:].detach(), expected.detach())
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[1:-1].unique().tolist() == [1.0] and x.grad[0].unique().tolist() == [2.0]
    assert_same(ops.all_sum_reduce(x.detach(), P_x, [0]), x.detach())
    wire.close()


PROGRAM = """
import torch, gpudist
P_world = gpudist.init(timeout=20)
assert P_world.transport == "nccl", P_world.transport
P_x = P_world.create_cartesian_topology_partition([2])
print(gpudist.all_sum_reduce(torch.ones(2), P_x, [0]).tolist())
"""


def test_init_under_torchrun() -> None:
    use_doubles()
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "GPUDIST_TRANSPORT": "nccl", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--no-python", warm.python(), "-c", PROGRAM],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("[2.0, 2.0]") == 2
