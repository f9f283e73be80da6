"""The messages of a halo by torch.distributed, as a peer: no packing, no output."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.case import Side
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world.partition import Partition


def sides(
    P_world: Partition, sizes: Sequence[int], seed_of_rank: Callable[[int], int]
) -> dict[str, Side]:
    """Return ``batch_isend_irecv`` of ``sizes`` float32 cells to and from one peer, with its waits.

    With several ranks the peer is a real one. A single rank sends to itself over NCCL, and over
    torch's ``fake`` process group, which carries nothing: that time consists of Python and torch's
    dispatcher alone, and the result is not checked.
    """
    backend = start(P_world)
    if P_world.size > 1:
        return {f"batch_isend_irecv, {backend}": _side(P_world, sizes, seed_of_rank, None)}
    found = {"batch_isend_irecv, fake": _side(P_world, sizes, seed_of_rank, _fake())}
    if backend == "nccl":
        to_itself = _side(P_world, sizes, seed_of_rank, None)
        refusal = _refusal(to_itself)
        if refusal:
            print(f"omitted: batch_isend_irecv to itself, which fails: {refusal}", file=sys.stderr)
        else:
            found["batch_isend_irecv to itself, nccl"] = to_itself
    return found


def start(P_world: Partition) -> str:
    """Make torch's process group of all ranks, unless one exists; return its backend."""
    on_gpu = P_world.device.type == "cuda"
    if not dist.is_initialized():
        wire = P_world.wire
        assert isinstance(wire, NcclTransport)
        shared = dist.PrefixStore(f"{wire.prefix}/torch", wire.store)
        # A separate store prefix, so that a second group does not read the first one's keys.
        number = shared.add(f"starts of rank {P_world.rank}", 1)
        store = dist.PrefixStore(str(number), shared)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=P_world.rank or 0,
            world_size=P_world.size, device_id=P_world.device if on_gpu else None,
        )  # fmt: skip
        # A rank that left early would break connections that others are still making.
        dist.barrier()
    return dist.get_backend()


def end() -> None:
    """Destroy torch's process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _refusal(side: Side) -> str:
    try:
        side.call()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def _fake() -> dist.ProcessGroup:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    group = dist.new_group([0], backend="fake")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _side(
    P_world: Partition,
    sizes: Sequence[int],
    seed_of_rank: Callable[[int], int],
    group: dist.ProcessGroup | None,
) -> Side:
    rank = P_world.rank or 0
    peer = rank ^ 1 if P_world.size > 1 else 0
    sent = [_cells(n, seed_of_rank(rank) + i, P_world.device) for i, n in enumerate(sizes)]
    expected = [_cells(n, seed_of_rank(peer) + i, P_world.device) for i, n in enumerate(sizes)]
    received = [torch.zeros_like(cells) for cells in sent]

    def call() -> list[torch.Tensor]:
        operations = [dist.P2POp(dist.isend, cells, peer, group) for cells in sent]
        operations += [dist.P2POp(dist.irecv, cells, peer, group) for cells in received]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def is_right(result: list[torch.Tensor]) -> bool:
        return group is not None or all(map(torch.equal, result, expected))

    return Side(call, is_right, lambda: [cells.zero_() for cells in received])


def _cells(count: int, seed: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(count, device=device) * 31 + seed * 17).remainder(251).float() + 1
