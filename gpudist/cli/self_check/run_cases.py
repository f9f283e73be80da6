"""Run every case: exactness, the dot test, and bandwidth compared to a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpudist.cli.self_check.cases import cases
from gpudist.cli.self_check.link_speeds import LinkSpeed, link_speeds
from gpudist.cli.self_check.remedies import kind_of, rank_environments, remedies_of
from gpudist.testing import dot_test
from gpudist.world.links import gpu_links
from gpudist.world.partition import Partition

SMALL = (12, 20)
TOLERANCE = 1e-12
COLUMNS = 1024
DEFAULT_MIB = 4
REPEATS = 7
# Share of a plain copy's bandwidth below which an operator counts as slow.
SLOW_SHARE = 0.1


@dataclass(frozen=True)
class Result:
    """Result of the check of one operator.

    Attributes:
        name: name of the operator.
        exact: whether every cell of its output was correct, on every rank.
        adjoint_error: ``|<Fx,y> - <x,F*y>|`` in units of their norms.
        time_us: microseconds of one call on the slowest rank, the fastest of several calls.
        gbps: bytes in and out of the busiest rank in that time, in GB/s.
        share: bandwidth relative to a plain copy of the same bytes on all ranks at once.
    """

    name: str
    exact: bool
    adjoint_error: float
    time_us: float
    gbps: float
    share: float

    @property
    def passed(self) -> bool:
        return self.exact and self.adjoint_error <= TOLERANCE

    @property
    def is_slow(self) -> bool:
        return self.share < SLOW_SHARE


@dataclass(frozen=True)
class Report:
    """Results of :func:`check`; the same on every rank.

    Attributes:
        ranks, transport, device: number of ranks, transport and device of the world.
        copy_gbps: bytes read and written by a plain copy on all ranks at once, in GB/s per rank.
        results: results by operator.
        links: speeds between pairs of ranks; empty in a world of one.
        kinds: kinds of the links, such as ``"NV18"``; empty if unknown.
        remedies: sentences that advise the user.
    """

    ranks: int
    transport: str
    device: str
    copy_gbps: float
    results: tuple[Result, ...]
    links: tuple[LinkSpeed, ...] = ()
    kinds: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        results_pass = all(result.passed for result in self.results)
        return results_pass and all(link.right for link in self.links)


def check(
    P_world: Partition,
    mebibytes: int = DEFAULT_MIB,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Report:
    """Check every operator. Collective over ``P_world``.

    Args:
        P_world: partition of all workers.
        mebibytes: size of each rank's block when speed is measured.
        progress: called with the next item, the number of finished items, and the total.

    Raises:
        TransportError: if a rank failed, or did not answer in time.
    """
    rows = max(1, mebibytes * 2**20 // (4 * COLUMNS))
    small = cases(P_world, *SMALL)
    large = cases(P_world, rows, COLUMNS, torch.float32)
    steps = ["plain copy", *(name for name, _ in small), "links", ""]

    def begin(done: int) -> None:
        progress(steps[done], done, len(steps) - 1)

    begin(0)
    copied = _copy_gbps(P_world, rows * COLUMNS * 4)
    measured: list[tuple[str, bool, float, float, float]] = []
    for number, ((name, make), (_, make_large)) in enumerate(zip(small, large, strict=True), 1):
        begin(number)
        case = make()
        wrong = 0 if case.is_exact(case.operator(case.x)) else 1
        tested = dot_test(case.operator, case.x, P_world)
        error = float("inf") if tested.misfits else tested.error
        exact = P_world.allreduce_data([wrong])[0] == 0
        at_speed = make_large()
        time_us, nbytes = _time_us(at_speed.operator, at_speed.x, P_world)
        measured.append((name, exact, error, time_us, nbytes / time_us / 1e3))
    copied = max(copied, _copy_gbps(P_world, rows * COLUMNS * 4))
    begin(len(small) + 1)
    links = link_speeds(P_world, rows * COLUMNS * 4)
    where, wires = rank_environments(P_world), gpu_links() if P_world.device.type == "cuda" else ()
    begin(len(steps) - 1)
    return Report(
        P_world.size, P_world.transport, str(P_world.device), copied,
        tuple(Result(*numbers, share=numbers[-1] / copied) for numbers in measured),
        links, tuple(kind_of(link, where, wires) for link in links),
        tuple(remedies_of(where, links, wires)),
    )  # fmt: skip


def verdict(report: Report) -> str:
    """Summarize the report in words."""
    where = f"{report.ranks} ranks over {report.transport}"
    wrong = [result.name for result in report.results if not result.passed]
    if wrong:
        return (
            f"Do not use this installation: on {where}, {len(wrong)} of {len(report.results)} "
            f"operators are wrong: {', '.join(wrong)}."
        )
    broken = [f"{link.first}-{link.second}" for link in report.links if not link.right]
    if broken:
        return (
            f"Do not use this installation: on {where}, messages arrive wrong between ranks "
            f"{', '.join(broken)}."
        )
    right = f"All {len(report.results)} operators are right on {where}"
    slow = [result.name for result in report.results if result.is_slow]
    if slow:
        return (
            f"{right}, but these reach less than {SLOW_SHARE:.0%} of a plain copy's speed: "
            f"{', '.join(slow)}. {_why_slow(report.transport)}"
        )
    slowest = min(report.results, key=lambda result: result.share)
    return (
        f"{right}; the slowest, {slowest.name}, reaches {slowest.share:.0%} of a plain copy's "
        f"speed, and less than {SLOW_SHARE:.0%} would be slow."
    )


def _why_slow(transport: str) -> str:
    if transport == "gloo":
        return "gloo goes through the network's sockets; on one node, build the native core."
    if transport == "nccl":
        return "`gpudist env` shows how the GPUs are linked; NCCL_DEBUG=INFO, what NCCL uses."
    return (
        "Another program may be busy on this machine, or there are fewer cores than ranks; set "
        "OMP_NUM_THREADS=1 and try again."
    )


def _copy_gbps(P_world: Partition, nbytes: int) -> float:
    x = torch.ones(nbytes // 4, dtype=torch.float32, device=P_world.device)
    y = torch.zeros_like(x)
    time_us, copied = _time_us(y.copy_, x, P_world)
    return copied / time_us / 1e3


def _time_us(
    call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, P_world: Partition
) -> tuple[float, int]:
    """Return microseconds of the fastest call on the slowest rank, and bytes of the busiest one."""
    y = call(x)
    times: list[float] = []
    for _ in range(REPEATS):
        _finish(P_world)
        start = time.perf_counter()
        y = call(x)
        _finish(P_world)
        times.append(time.perf_counter() - start)
    nanoseconds = int(min(times) * 1e9)
    nbytes = x.nbytes + y.nbytes
    longest, most = P_world.allreduce_data([max(1, nanoseconds), nbytes], "max")
    return longest / 1e3, most


def _finish(P_world: Partition) -> None:
    if P_world.device.type == "cuda":
        torch.cuda.synchronize(P_world.device)
    P_world.barrier()
