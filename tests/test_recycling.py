"""Recycled memory: what is reused and when, what is bounded, and how long it lives."""

from __future__ import annotations

import gc
import os
import pickle
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import gpudist
from gpudist import ops, recycling
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.world.partition import Partition
from tests.pool import distributed

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
SHAPE = (3, 1024, 256)  # of 3 MiB in float32

needs_core = pytest.mark.skipif(not is_built(), reason=what_is_missing())


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Leave what exists out of the collections of these tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def limit() -> Iterator[int]:
    """An empty pool with room for 64 MiB."""
    before = recycling.statistics().limit_bytes
    gc.collect()
    gpudist.empty_cache()
    recycling.set_limit(64 * MIB)
    yield 64 * MIB
    recycling.set_limit(before)


def taken() -> torch.Tensor:
    return recycling.empty(SHAPE, torch.float32)


def is_recycled(x: torch.Tensor) -> bool:
    return not x.untyped_storage().resizable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@needs_core
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(limit: int, name: str) -> None:
    dtype = getattr(torch, name)
    x = recycling.empty((1024, 1024, 2), dtype)
    assert is_recycled(x)
    assert (x.shape, x.dtype, x.device) == ((1024, 1024, 2), dtype, torch.device("cpu"))
    assert x.is_contiguous() and x.is_leaf and not x.requires_grad
    assert x.data_ptr() % PAGE == 0
    assert torch.equal(x.fill_(1), torch.ones(1024, 1024, 2, dtype=dtype))


@needs_core
def test_memory_is_reused_by_the_next_of_its_class(limit: int) -> None:
    before = recycling.statistics()
    x = taken().fill_(1)
    address = x.data_ptr()
    y = taken()
    assert y.data_ptr() != address
    del x
    assert recycling.statistics().idle_bytes == 3 * MIB
    z = recycling.empty((3 * MIB - 100,), torch.uint8)
    assert z.data_ptr() == address
    after = recycling.statistics()
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 2)
    assert after.in_use_bytes - before.in_use_bytes == 6 * MIB
    assert after.idle_bytes == 0


class Product:
    """Holds what autograd saved of ``x``, and nothing else."""

    def __init__(self, x: torch.Tensor) -> None:
        self.y = (x * torch.ones(1, requires_grad=True)).sum()


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x[1:, 5:7],
    "transpose": lambda x: x.transpose(0, 2),
    "detached": lambda x: x.detach(),
    "storage": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.numpy()[2:],
    "memoryview": lambda x: x.numpy().data,
    "dlpack": lambda x: torch.from_dlpack(x),
    "saved for backward": Product,
    "parameter": torch.nn.Parameter,
}


@needs_core
@pytest.mark.parametrize("name", HOLDERS)
def test_memory_stays_while_anything_shares_it(limit: int, name: str) -> None:
    x = taken()
    address = x.data_ptr()
    holder = HOLDERS[name](x)
    del x
    gc.collect()
    others = [taken() for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    del holder, others
    gc.collect()
    assert address in [y.data_ptr() for y in [taken() for _ in range(4)]]


@needs_core
def test_a_saved_tensor_keeps_its_values(limit: int) -> None:
    scale = torch.ones(1, requires_grad=True)
    y = (taken().fill_(2) * scale).sum()
    for _ in range(3):
        taken().fill_(100)
    y.backward()
    assert scale.grad is not None
    assert scale.grad.item() == 2 * 3 * 1024 * 256


@needs_core
def test_memory_is_let_go_of_by_another_thread(limit: int) -> None:
    boxes: queue.Queue[torch.Tensor] = queue.Queue()
    go = threading.Event()

    def hold() -> None:
        x = boxes.get()
        go.wait()
        del x

    holder = threading.Thread(target=hold)
    holder.start()
    x = taken()
    address = x.data_ptr()
    boxes.put(x)
    del x
    assert taken().data_ptr() != address
    go.set()
    holder.join()
    assert address in [y.data_ptr() for y in [taken() for _ in range(2)]]


@needs_core
def test_threads_do_not_share_blocks(limit: int) -> None:
    shelf: list[torch.Tensor | None] = [None] * 8
    wrong: list[str] = []

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(200):
            mine = recycling.empty((numbers.randint(MIB, 2 * MIB),), torch.uint8)
            mark = numbers.randrange(256)
            mine[:: 64 * 1024] = mark
            mine[-1] = mark
            place = numbers.randrange(len(shelf))
            other, shelf[place] = shelf[place], mine
            del mine
            if other is not None and not (other[:: 64 * 1024] == other[-1]).all():
                wrong.append("a block was written by two")
            if numbers.random() < 0.02:
                gpudist.empty_cache()

    before = recycling.statistics()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    after = recycling.statistics()
    assert after.hits + after.misses - before.hits - before.misses == 800
    shelf.clear()
    assert recycling.statistics().in_use_bytes == before.in_use_bytes


@needs_core
def test_least_recently_used_memory_goes_first(limit: int) -> None:
    recycling.set_limit(8 * MIB)
    old, new = recycling.empty((5 * MIB,), torch.uint8), recycling.empty((4 * MIB,), torch.uint8)
    addresses = old.data_ptr(), new.data_ptr()
    del old
    del new
    assert recycling.statistics().idle_bytes == 4 * MIB
    assert recycling.empty((4 * MIB,), torch.uint8).data_ptr() == addresses[1]
    del addresses
    recycling.set_limit(MIB)
    assert recycling.statistics().idle_bytes == 0


@needs_core
def test_nothing_is_kept_without_a_limit(limit: int) -> None:
    live = taken()
    recycling.set_limit(0)
    hits = recycling.statistics().hits
    del live
    assert recycling.statistics().idle_bytes == 0
    for _ in range(3):
        taken()
    assert recycling.statistics().hits == hits
    recycling.set_limit(limit)
    taken()
    taken()
    assert recycling.statistics().hits == hits + 1
    with pytest.raises(ValueError, match="limit_bytes is -1; it must be at least 0"):
        recycling.set_limit(-1)


@needs_core
def test_empty_cache_gives_memory_back(limit: int) -> None:
    x = recycling.empty((48 * MIB,), torch.uint8).fill_(1)
    full = resident_bytes()
    del x
    assert resident_bytes() > full - 8 * MIB
    gpudist.empty_cache()
    assert resident_bytes() < full - 40 * MIB
    assert recycling.statistics().idle_bytes == 0


@needs_core
def test_memory_stays_bounded(limit: int) -> None:
    numbers = random.Random(0)
    before = resident_bytes()
    most = 0
    for _ in range(1000):
        recycling.empty((numbers.randint(MIB, 8 * MIB) // 2 * 2 + 1,), torch.uint8).fill_(1)
        assert recycling.statistics().idle_bytes <= limit
        most = max(most, resident_bytes())
    assert most - before < limit + 16 * MIB


@needs_core
def test_only_large_tensors_are_recycled(limit: int) -> None:
    least = recycling.THRESHOLD_BYTES
    for dtype in (torch.uint8, torch.complex128):
        items = least // dtype.itemsize
        assert is_recycled(recycling.empty((items,), dtype))
        assert not is_recycled(recycling.empty((items - 1,), dtype))
    for shape in ((), (0,), (0, 2 * least)):
        assert recycling.empty(shape, torch.float32).shape == shape
    assert recycling.empty((2 * least,), torch.uint16).dtype == torch.uint16
    assert recycling.empty(torch.Size(SHAPE), torch.float32).shape == SHAPE
    with torch.device("meta"):
        assert recycling.empty((2,), torch.float32).device.type == "cpu"
        assert taken().device.type == "cpu"


@needs_core
def test_what_torch_does_with_a_tensor(limit: int) -> None:
    x = taken().fill_(1)
    address = x.data_ptr()
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    assert torch.equal(x.add_(1).mul_(3), torch.full(SHAPE, 6.0))
    assert x.data_ptr() == address
    x.requires_grad_()
    x.square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full(SHAPE, 12.0))
    with torch.inference_mode():
        assert taken().is_inference()
    shared = taken().fill_(2).share_memory_()
    assert shared.is_shared()
    assert torch.equal(shared, torch.full(SHAPE, 2.0))


@needs_core
def test_a_capsule_that_nobody_takes(limit: int) -> None:
    assert recycling._native is not None
    before = recycling.statistics()
    capsule = recycling._native.recycled_tensor(SHAPE, recycling._native.Dtype.float32)
    assert recycling.statistics().in_use_bytes == before.in_use_bytes + 3 * MIB
    del capsule
    assert recycling.statistics().in_use_bytes == before.in_use_bytes


@needs_core
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_without_cells_and_dims(limit: int, name: str) -> None:
    assert recycling._native is not None
    for shape in ((), (3, 0, 1 << 40)):
        x = from_dlpack(
            recycling._native.recycled_tensor(shape, getattr(recycling._native.Dtype, name))
        )
        assert (x.shape, x.dtype, x.is_contiguous()) == (shape, getattr(torch, name), True)


@needs_core
@pytest.mark.parametrize("recycles", [False, True])
def test_memory_of_several_tensors(limit: int, recycles: bool) -> None:
    """It lasts as long as any of them, and none reaches beyond it."""
    core: Any = recycling._native
    dtypes, before = [core.Dtype.float64, core.Dtype.int8], recycling.statistics().in_use_bytes
    memory = core.SharedMemory(100, recycles)
    for offset in (65, 101):
        with pytest.raises(ValueError, match="beyond its memory"):
            memory.tensors(dtypes, [(2, 3), (36,)], [0, offset])
    with pytest.raises(ValueError, match="a dtype, a shape and an offset"):
        memory.tensors(dtypes, [(2, 3)], [0])
    x, y = map(from_dlpack, memory.tensors(dtypes, [(2, 3), (36,)], [0, 64]))
    assert (x.shape, x.stride(), x.dtype) == ((2, 3), (3, 1), torch.float64)
    assert x.data_ptr() % 64 == 0 and y.data_ptr() == x.data_ptr() + 64
    assert x._base is None and y._base is None
    del memory, x
    assert recycling.statistics().in_use_bytes - before == recycles * PAGE
    y.fill_(1)
    del y
    assert recycling.statistics().in_use_bytes == before


@needs_core
def test_a_tensor_cannot_grow(limit: int) -> None:
    assert taken().resize_(3, 5).shape == (3, 5)
    with pytest.raises(RuntimeError, match="not resizable"):
        taken().resize_(4, 1024, 1024)


@needs_core
@pytest.mark.parametrize(
    ("shape", "text"),
    [((1 << 50,), "allocate"), ((1 << 40, 1 << 40), "overflow"), ((-1, -MIB), "negative")],
)
def test_impossible_tensor(limit: int, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        recycling.empty(shape, torch.float32)


def test_without_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling, "_native", None)
    x = taken()
    assert (x.shape, x.dtype, is_recycled(x)) == (SHAPE, torch.float32, False)
    recycling.set_limit(MIB)
    recycling.empty_cache()
    assert recycling.statistics() == recycling.Statistics(0, 0, 0, 0, 0)


@needs_core
@distributed(ranks=2)
def test_large_outputs_are_recycled(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    x = torch.ones(MIB // 4, requires_grad=True)
    y = ops.all_sum_reduce(x, P_x, [0])
    assert is_recycled(y)
    assert torch.equal(y, torch.full_like(x, 2.0))
    (gradient,) = torch.autograd.grad(y, x, torch.ones(MIB // 4))
    assert is_recycled(gradient)
    assert torch.equal(gradient, torch.full_like(x, 2.0))
    assert not is_recycled(ops.all_sum_reduce(x[1:], P_x, [0]))


def run(script: str) -> None:
    """Run a script in a new interpreter, and assert that it succeeds without output."""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


START = """
import os, threading, torch
from gpudist import recycling
def taken():
    return recycling.empty((1 << 20,), torch.float32)
"""

AT_EXIT = """
import atexit
of_module = taken()
of_cycle = [taken()]
of_cycle.append(of_cycle)
of_graph = (taken() * torch.ones(1, requires_grad=True)).sum()
torch.kept = taken().numpy()
atexit.register(lambda x: x.fill_(1), taken())
ready, never = threading.Event(), threading.Event()
def hold():
    x = taken()
    ready.set()
    never.wait()
threading.Thread(target=hold, daemon=True).start()
ready.wait()
"""


@needs_core
def test_tensors_may_live_at_exit() -> None:
    """A module's, one in a cycle, a graph's, another module's, atexit's, a daemon thread's."""
    run(START + AT_EXIT)


@needs_core
def test_fork() -> None:
    """The child has what lives, no idle block, and a pool that works; the parent keeps its own."""
    run(
        START
        + """
x, idle = taken().fill_(1), taken().fill_(1)
address = idle.data_ptr()
del idle
child = os.fork()
if child == 0:
    assert recycling.statistics().idle_bytes == 0
    assert (x == 1).all()
    x.fill_(2)
    mine = x.data_ptr()
    del x
    assert taken().data_ptr() == mine
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (x == 1).all()
assert taken().data_ptr() == address
"""
    )


@pytest.mark.parametrize("shape", [(1 << 20,), (2, 1, 1024, 1024), (1, 3, 5)])
def test_a_maker_of_large_tensors_on_a_gpu_takes_no_memory(shape: tuple[int, ...]) -> None:
    """It is made while the step that needs it may fill the GPU."""
    asked: list[int] = []

    def empty(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append(prod(shape) if isinstance(shape, tuple) else shape)
        return torch.zeros(shape, dtype=dtype)

    with patch.object(recycling.torch, "empty", empty):
        make = recycling.maker(shape, torch.float32, torch.device("cuda"))
    assert asked[0] * 4 < recycling.THRESHOLD_BYTES and len(asked) == 1
    y = make()
    assert y.shape == shape and y.is_contiguous() and y.untyped_storage().nbytes() == 4 * y.numel()
