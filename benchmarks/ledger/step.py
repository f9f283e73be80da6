"""Count one training step of a network on a world of ranks, beside the sequential network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import gpudist
from benchmarks.ledger.counting import Counting, Counts
from benchmarks.ledger.gpu_autocast import gpu_autocast
from benchmarks.ledger.gpu_dropout import GpuDropout
from benchmarks.ledger.networks import SUBJECTS, Size, Subject
from gpudist.nn.kernel_choice import as_on_gpu
from gpudist.planning.rehearsal import KeptForBackward
from gpudist.profiling import Stats
from gpudist.sbp.global_parameter import block_of
from gpudist.world.partition import Partition
from tests.doubles.nccl import count

DTYPES = ("float32", "bfloat16")
_WARM_UP = 2


@dataclass(frozen=True)
class Row:
    """Counts of the first rank's step, and of the sequential network's step on the same block.

    A step is a forward, the mean square of the output, a backward and the sums of gradients over
    ranks, with gradients unset before.

    Attributes:
        network: name of the network.
        ranks: number of ranks; the first spatial dim, or the sequence, is split over them.
        dtype: ``"float32"``, or ``"bfloat16"`` under autocast.
        layout: memory format of input and weights.
        launches: kernels, without those of NCCL.
        halos: halo exchanges of the forward.
        split_norms: norms whose statistics are summed over ranks.
        device_bytes: bytes that kernels read and write.
        copied_bytes: those of them with which gpudist copies a tensor to another one, with or
            without adding what arrived: a block beside its ghosts and its gradient back; sums of
            gradients over two ranks.
        moved_bytes: bytes in messages that are sent and received.
        kept_bytes: bytes that autograd keeps for backward, without parameters.
        nccl_groups: groups of NCCL calls.
        host_us: thread-CPU time of a step on the network's smallest input in microseconds, the
            median of paired runs: Python, and small kernels as this CPU runs them.
    """

    network: str
    ranks: int
    dtype: str
    layout: str
    launches: int
    launches_sequential: int
    halos: int
    split_norms: int
    device_bytes: int
    device_bytes_sequential: int
    copied_bytes: int
    moved_bytes: int
    kept_bytes: int
    kept_bytes_sequential: int
    nccl_groups: int
    host_us: float | None
    host_us_sequential: float | None


class Step:
    """A training step of a network on this rank's block."""

    def __init__(self, network: nn.Module, x: torch.Tensor, dtype: str) -> None:
        self.network, self._x, self._autocasts = network, x, dtype != "float32"
        self._held = [block_of(p) for p in network.parameters()]

    def __call__(self, kept: KeptForBackward | None = None) -> None:
        for parameter in self.network.parameters():
            parameter.grad = None
        with _entered(kept):
            loss = self.loss()
        loss.backward()

    def loss(self) -> torch.Tensor:
        """Return the mean square of the outputs."""
        device = self._x.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._autocasts):
            outputs = tree_leaves(self.network(self._x))
            found: Any = sum(
                y.float().square().mean()
                for y in outputs
                if isinstance(y, torch.Tensor) and y.is_floating_point()
            )
        return found

    def count(self) -> tuple[Counts, int]:
        """Return what a step runs, and the bytes that it keeps for backward."""
        for _ in range(_WARM_UP):
            self()
        with Counting() as counting:
            self()
        kept = KeptForBackward(self._held)
        self(kept)
        return counting.counts(), kept.nbytes


@contextmanager
def _entered(context: Any) -> Iterator[None]:
    if context is None:
        yield
    else:
        with context:
            yield


def count_step(P_world: Partition, name: str, dtype: str, layout: str, timed: int) -> Row:
    """Return the row of one case. Collective over the world.

    Args:
        P_world: all ranks.
        name: name of the network in ``SUBJECTS``.
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast.
        layout: ``"contiguous"`` or ``"channels_last"``.
        timed: number of pairs of timed steps; 0 for none.
    """
    torch.set_num_threads(1)
    case = Case(P_world, SUBJECTS[name], dtype, layout)
    with as_on_gpu(), gpu_autocast(dtype != "float32"):
        ours, alone = case.steps(case.subject.size)
        with GpuDropout():
            sequential, kept_sequential = alone.count()
        counts, kept = ours.count()
        gpudist.stats(reset=True)
        groups = count("nccl_group")
        ours()
        groups, stats = count("nccl_group") - groups, gpudist.stats()
        host_us = (None, None)
        if timed and case.subject.least:
            host_us = _paired_us(P_world, *case.steps(case.subject.least), timed)
    return Row(
        name, P_world.size, dtype, layout, counts.launches, sequential.launches,
        _calls(stats, "halo_exchange", "ghosts"), _calls(stats, "moments"),
        counts.size_bytes, sequential.size_bytes, counts.copied_bytes,
        stats.total.sent_bytes + stats.total.received_bytes,
        kept, kept_sequential, groups, *host_us,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    P_world: Partition
    subject: Subject
    dtype: str
    layout: str

    def steps(self, size: Size) -> tuple[Step, Step]:
        """Return the step of the converted network, and the sequential one on the same block."""
        ranks = self.P_world.size
        device = self.P_world.device
        torch.manual_seed(0)
        network = self.subject.make(size).to(device)
        beside = self.subject.make(self.subject.block(size, ranks)).to(device)
        torch.manual_seed(1 + (self.P_world.rank or 0))
        x = self.subject.input(size, ranks).to(device)
        if self.layout == "channels_last":
            form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
            for part in (network, beside):
                part.to(memory_format=form)  # pyright: ignore[reportCallIssue]
            x = x.contiguous(memory_format=form)
        P_x = self.P_world.create_cartesian_topology_partition(self.subject.grid(ranks))
        argument = next(iter(signature(network.forward).parameters))
        converted = gpudist.distribute(network, P_x, inputs={argument: "block"})
        return Step(converted, x, self.dtype), Step(beside, x, self.dtype)


def _calls(stats: Stats, *starts: str) -> int:
    return sum(row.calls for row in stats if row.operator.startswith(starts))


def _paired_us(
    P_world: Partition, ours: Callable[[], None], alone: Callable[[], None], pairs: int
) -> tuple[float, float]:
    """Return median thread-CPU times of both steps in microseconds, which take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for step, found in zip((ours, alone), times, strict=True):
            P_world.barrier()
            start_s = time.thread_time()
            step()
            found.append(1e6 * (time.thread_time() - start_s))
    return round(statistics.median(times[0])), round(statistics.median(times[1]))
