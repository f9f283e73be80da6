"""Bodies on arrays: CuPy's where the world is on GPUs, NumPy's where it is on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

import gpudist
from gpudist.world.partition import Partition
from tests.gpu.operators import integers, on_grid
from tests.gpu.streams import BUSY_CYCLES, late_stream
from tests.ops.dense import local_input


def library(device: torch.device) -> Any:
    if device.type != "cuda":
        return np
    import cupy  # pyright: ignore[reportMissingImports]

    return cupy


def on_host(x: Any) -> torch.Tensor:
    """A copy."""
    return torch.from_numpy(x.copy() if isinstance(x, np.ndarray) else x.get())


@contextmanager
def apart(device: torch.device, late: str) -> Iterator[None]:
    """Make a stream of CuPy's own its current one; one of the libraries is late, or neither."""
    if device.type != "cuda":
        yield
        return
    stream = library(device).cuda.Stream(non_blocking=True)
    if late == "CuPy":
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, device)):
            torch.cuda._sleep(BUSY_CYCLES)
    with stream, late_stream(device) if late == "torch" else nullcontext():
        yield


def functions(P_world: Partition) -> dict[str, Callable[[Any], Any]]:
    P_x = on_grid(P_world)
    P_y = P_world.create_cartesian_topology_partition([1, P_world.size])
    halo = ((1, 2), (2, 1))
    return {
        "halo exchange": partial(gpudist.halo_exchange, P_x=P_x, halo=halo, periodic=True),
        "repartition": partial(gpudist.repartition, P_x=P_x, P_y=P_y),
        "gather": partial(gpudist.gather, P_x=P_x),
        "scatter": lambda x: gpudist.scatter(x if P_world.rank == 0 else None, P_x),
    }


def in_stream_order(P_world: Partition, late: str) -> dict[str, torch.Tensor]:
    """CuPy writes the input just before the operator, and reads its output just after.

    By copies alone: a kernel would be compiled and loaded, which waits for the peers' kernels.
    """
    device = P_world.device
    xp = library(device)
    values = local_input(integers((5, 7)), on_grid(P_world)).numpy().copy()
    finish = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    results: dict[str, torch.Tensor] = {}
    for name, function in functions(P_world).items():
        x, written = xp.asarray(np.full_like(values, np.nan)), xp.asarray(values)
        function(x)
        finish()
        with apart(device, late):
            xp.copyto(x, written)
            y = function(x)
            read = y.copy()
            # Its memory must not become this other tensor's before CuPy has read it.
            del y
            torch.zeros(read.shape, dtype=torch.float64, device=device)
        finish()
        assert type(read) is xp.ndarray
        results[name] = on_host(read)
    return results
