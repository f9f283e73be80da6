"""Bodies that use their own stream, mostly late ones. On a CPU they just run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from gpudist.exchange import start
from gpudist.ops import HaloExchange, Repartition
from gpudist.world.partition import Partition
from tests.doubles.graphs import Graph
from tests.gpu.operators import OPERATORS, integers, on_cpu, on_grid
from tests.ops.dense import local_input

# Tens of milliseconds: whoever does not wait for this stream reads what was there before.
BUSY_CYCLES = 50_000_000


# These have no work between two stages, which a graph of the double would not keep.
ONE_STAGE = ("halo, periodic", "repartition of rows to columns")


@contextmanager
def late_stream(device: torch.device) -> Iterator[None]:
    """Make a new stream current, which begins with a pause; what comes after it waits for it."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
        yield
    before.wait_stream(stream)


def recorded(call: Callable[[], Any], device: torch.device, rehearsed: bool) -> Callable[[], Any]:
    """Capture ``call`` as a CUDA graph, after one call outside it; on a CPU, the call itself.

    Args:
        call: what is captured.
        device: of its tensors.
        rehearsed: over the doubles, capture it as a graph of theirs: it has operators of gpudist's
            alone, since torch's on CPU tensors would not be carried out again.

    Returns:
        What replays the graph and returns what ``call`` returned under capture. It owns the graph.
    """
    if device.type == "cuda":
        return _recorded_on_gpu(call, device)
    call()
    return _recorded_by_double(call) if rehearsed else call


def _recorded_on_gpu(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    # One stream for both, as torch asks where gradients are accumulated.
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        call()
    current.wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Threads that watch communicators ask for events meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _recorded_by_double(call: Callable[[], Any]) -> Callable[[], Any]:
    with Graph() as graph:
        result = call()

    def replay() -> Any:
        graph.launch()
        return result

    # As torch's graph goes with its last reference; one that is there at the end stays.
    weakref.finalize(replay, graph.destroy).atexit = False
    return replay


def on_late_stream(P_world: Partition, case: str) -> dict[str, torch.Tensor]:
    """The operator and its gradient read what the stream writes just before them."""
    operator, values = OPERATORS[case](P_world)
    x = torch.full_like(values, torch.nan, device=P_world.device).requires_grad_()
    operator(x)
    late = values.to(P_world.device)
    with late_stream(P_world.device):
        with torch.no_grad():
            x.copy_(late)
        y = operator(x)
        cotangent = integers(y.shape, 100 + (P_world.rank or 0)).to(y.device)
        (gradient,) = torch.autograd.grad(y, x, cotangent)
    return on_cpu(y=y, gradient=gradient)


def streams_in_turn(P_world: Partition) -> dict[str, torch.Tensor]:
    """Each call is on the stream that is current then; they share what the transport stages in."""
    P_x = on_grid(P_world)
    operator = HaloExchange(P_x, halo=((1, 2), (2, 1)), periodic=True)
    results: dict[str, torch.Tensor] = {}
    for turn in range(6):
        x = local_input(integers((5, 7), turn), P_x).to(P_world.device)
        with late_stream(P_world.device):
            results[f"late {turn}"] = operator(x + 1)
        results[f"soon {turn}"] = operator(x)
    return on_cpu(**results)


def started(P_world: Partition, is_late: bool) -> dict[str, torch.Tensor]:
    """Two movements in flight together while the current stream goes on with other work."""
    P_x = on_grid(P_world)
    P_y = P_world.create_cartesian_topology_partition([1, P_world.size])
    operators = (HaloExchange(P_x, halo=((1, 2), (2, 1)), periodic=True), Repartition(P_x, P_y))
    values = local_input(integers((5, 7)), P_x).to(P_world.device)
    x = torch.full_like(values, torch.nan)
    movements = tuple(operator.movement(x) for operator in operators)
    results: dict[str, torch.Tensor] = {}
    with late_stream(P_world.device) if is_late else nullcontext():
        for turn in range(3):
            x.copy_(values + turn)
            in_flight = start(movements, (x, x))
            meanwhile = x * 2
            halo, moved = in_flight.wait(0) + 1, in_flight.wait(1) + 1
            x.fill_(torch.nan)  # after the wait the input is the caller's again
            for name, y in (("halo", halo), ("moved", moved), ("meanwhile", meanwhile)):
                results[f"{name} {turn}"] = y
    return on_cpu(**results)


def added_into(P_world: Partition, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The adjoint of a halo exchange adds to a tensor that has values."""
    P_x = on_grid(P_world)
    x = local_input(integers((5, 7), 0, dtype), P_x).to(P_world.device)
    movement = HaloExchange(P_x, halo=((1, 2), (2, 1)), periodic=True).movement(x)
    ghosts = integers(movement.output_shape, P_world.rank or 0, dtype).to(P_world.device)
    with late_stream(P_world.device):
        into = x.clone()
        total = start((movement.T,), (ghosts,), (into,)).wait(0)
    assert total.data_ptr() == into.data_ptr()
    return on_cpu(total=total)


def replayed(P_world: Partition, case: str) -> dict[str, torch.Tensor]:
    """An operator captured in a CUDA graph moves what is in its input at each replay."""
    operator, values = OPERATORS[case](P_world)
    x = torch.zeros_like(values, device=P_world.device)
    rehearsed = P_world.transport == "nccl" and case in ONE_STAGE
    replay = recorded(lambda: operator(x), P_world.device, rehearsed)
    results: dict[str, torch.Tensor] = {}
    for turn in range(3):
        x.copy_(values * turn)
        results[f"y {turn}"] = replay().clone()
    return on_cpu(**results)
