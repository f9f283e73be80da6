"""Tests that need several GPUs: the memory a process uses, and torch's messages beside ours."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpudist import nn
from gpudist.ops import HaloExchange
from gpudist.world.partition import Partition
from tests.gpu.devices import ON_DOUBLES, require_gpu
from tests.gpu.worlds import A_RANK_A_GPU, TWO_OR_MORE, SeveralRanks, why_there_is_no

require_gpu()

STEPS = 20


@pytest.fixture(scope="module", params=TWO_OR_MORE if ON_DOUBLES else [A_RANK_A_GPU])
def ranks(request: pytest.FixtureRequest) -> Iterator[SeveralRanks]:
    reason = why_there_is_no(request.param)
    if reason:
        pytest.skip(reason)
    world = SeveralRanks(request.param, more={"NCCL_LAUNCH_ORDER_IMPLICIT": "1"})
    yield world
    world.close()


def contexts(P_world: Partition) -> list[int]:
    """The GPUs on which this process has a context, after messages, and time to watch them."""
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    exchange = HaloExchange(P_x, halo=((1, 1),), periodic=True)
    for _ in range(STEPS):
        exchange(torch.ones(8, device=P_world.device))
        P_world.wire.wait()
    if P_world.device.type != "cuda":
        return []
    cuda = ctypes.CDLL("libcuda.so.1")
    found: list[int] = []
    for gpu in range(torch.cuda.device_count()):
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        result = cuda.cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(is_active))
        assert result == 0, result
        if is_active.value:
            found.append(gpu)
    return found


def test_a_context_on_the_own_gpu_alone(ranks: SeveralRanks) -> None:
    expected = [[] if ON_DOUBLES else [rank] for rank in range(ranks.size)]
    assert ranks.run(contexts) == expected


def data_parallel_beside_a_halo(P_world: Partition, port: int) -> list[float]:
    """Torch's DDP and our messages in each step, whose order on the GPU is that of the calls.

    Returns:
        The loss of each step, the same on all ranks.
    """
    on_gpu = P_world.device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}",
        rank=P_world.rank or 0, world_size=P_world.size,
        device_id=P_world.device if on_gpu else None,
    )  # fmt: skip
    try:
        return _trained(P_world, on_gpu)
    finally:
        dist.destroy_process_group()


def _trained(P_world: Partition, on_gpu: bool) -> list[float]:
    torch.manual_seed(0)
    P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size, 1])
    convolution = nn.DistributedConv2d(P_x, 2, 2, 3, padding=1).to(P_world.device)
    network = torch.nn.Linear(8, 8).to(P_world.device)
    parallel = DistributedDataParallel(network, device_ids=[P_world.rank] if on_gpu else None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    x = torch.ones(2, 2, 4, 8, device=P_world.device)
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = parallel(convolution(x)).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def test_data_parallel_beside_a_halo(ranks: SeveralRanks, free_port: int) -> None:
    first, *others = ranks.run(data_parallel_beside_a_halo, port=free_port)
    assert all(losses == first for losses in others)
    assert first[-1] < first[0] and not any(loss != loss for loss in first)


@pytest.fixture
def free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    return port
