"""A U-Net step that is out of memory on one worker, and trains on four under the same limit.

    torchrun --standalone --nproc-per-node 4 examples/too_big.py --compare

Every process may use --limit-mb of memory beyond what it has after importing torch: address space
on CPUs (RLIMIT_AS), the allocator's share of the device on GPUs. First one process tries the
sequential network, and runs out of memory. Then all workers train it, split by one line.
Finally, the example prints the peak of each.

--compare also trains the sequential network without a limit, and exits with 1 if a loss differs by
more than --tolerance of its value.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from comparison import progress
from networks import UNet3d
from rich.console import Console
from rich.table import Table
from torch import nn

import gpudist
from gpudist.geometry import Decomposition

MB = 1 << 20
OUT_OF_MEMORY = 3
# How long the other workers wait for the processes that rank 0 starts.
TIMEOUT_S = 3600.0


@contextmanager
def memory_limit(limit_mb: int, device: torch.device) -> Iterator[None]:
    """Let this process use ``limit_mb`` MB beyond what it uses now; 0 for no limit."""
    if not limit_mb:
        yield
    elif device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_mb * MB / total, device)
        yield
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        before = resource.getrlimit(resource.RLIMIT_AS)
        limit = int(address_space_mb("VmSize") + limit_mb) * MB
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_AS, before)


def address_space_mb(what: str) -> float:
    """Return ``VmSize``, the address space of this process, or ``VmPeak``, its largest so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(what))) / 1024


def used_mb(device: torch.device, what: str = "VmPeak") -> float:
    """Return the memory that the limit counts: address space on a CPU, allocated on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MB
    return address_space_mb(what)


def is_out_of_memory(error: RuntimeError) -> bool:
    texts = ("can't allocate memory", "could not create a primitive")  # torch's and oneDNN's
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts)


def volume(size: int, cells: tuple[slice, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block ``cells`` of a noisy wave, ``[1, 1, x, y, z]``, and its sign, 0 or 1."""
    x, y, z = torch.meshgrid(*(torch.arange(s.start, s.stop) for s in cells), indexing="ij")
    wave = (9.0 * x / size).sin() + (7.0 * y / size).sin() + (5.0 * z / size).sin()
    noise = (12.9898 * x + 78.233 * y + 37.719 * z).sin()
    return (wave + noise)[None, None].float(), (wave > 0).long()[None]


def train(
    network: nn.Module,
    x: torch.Tensor,
    classes: torch.Tensor,
    criterion: Callable[[Any, torch.Tensor], torch.Tensor],
    steps: int,
    report: Callable[[float], None],
) -> list[float]:
    """Return the loss of each step."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    for _ in range(steps):
        loss = criterion(network(x), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        report(losses[-1])
    return losses


def alone(options: argparse.Namespace, device: torch.device) -> int:
    """Train the sequential network in this process; print its losses and its memory as JSON."""
    torch.manual_seed(0)
    network = UNet3d(1, 2, options.width).to(device)
    x, classes = volume(options.size, (slice(0, options.size),) * 3)
    x, classes = x.to(device), classes.to(device)
    before_mb = used_mb(device, "VmSize")
    try:
        with (
            memory_limit(options.limit_mb, device),
            progress("sequential", options.steps, True) as report,
        ):
            losses = train(network, x, classes, nn.CrossEntropyLoss(), options.steps, report)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"one worker: {str(error).splitlines()[0]}", file=sys.stderr)
        return OUT_OF_MEMORY
    print(json.dumps({"losses": losses, "used_mb": used_mb(device) - before_mb}))
    return 0


def started_alone(options: argparse.Namespace, limit_mb: int) -> dict[str, Any] | None:
    """Return the results of a new process for the sequential network; ``None`` without memory.

    Args:
        options: options of this program.
        limit_mb: limit of that process; 0 for none.
    """
    given = [f"--{name}={getattr(options, name)}" for name in ("size", "width", "steps")]
    command = [sys.executable, __file__, "--alone", *given, f"--limit-mb={limit_mb}"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode == OUT_OF_MEMORY:
        return None
    ended.check_returncode()
    return json.loads(ended.stdout)


def run(options: argparse.Namespace) -> int:
    P_world = gpudist.init(TIMEOUT_S)
    device = P_world.device
    fits = P_world.rank == 0 and started_alone(options, options.limit_mb) is not None
    if P_world.broadcast_data([int(fits)])[0]:
        if fits:
            text = f"{options.limit_mb} MB are enough for one worker; lower --limit-mb"
            print(f"too_big.py: {text}", file=sys.stderr)
        return 1

    P_x = P_world.grid(*options.grid)
    torch.manual_seed(0)
    network = gpudist.distribute(UNet3d(1, 2, options.width).to(device), P_x)
    assert P_x.index is not None
    cells = Decomposition.balanced((options.size,) * 3, P_x.shape[2:]).block(P_x.index[2:]).slices
    x, classes = volume(options.size, cells)
    x, classes = x.to(device), classes.to(device)
    criterion = gpudist.nn.DistributedCrossEntropyLoss(P_x)
    before_mb = used_mb(device, "VmSize")
    with (
        memory_limit(options.limit_mb, device),
        progress(f"{P_world.size} workers", options.steps, P_world.rank == 0) as report,
    ):
        losses = train(network, x, classes, criterion, options.steps, report)
    used = [one[0] for one in P_world.allgather_data([used_mb(device) - before_mb])]

    if P_world.rank != 0:
        return P_world.broadcast_data([0])[0]
    theirs = started_alone(options, 0) if options.compare else None
    show(options, losses, used, theirs)
    difference = 0.0
    if theirs is not None:
        pairs = zip(losses, theirs["losses"], strict=True)
        difference = max(abs(a - b) / abs(b) for a, b in pairs)
        print(f"largest relative difference of a loss: {difference:.1e}")
    return P_world.broadcast_data([int(not difference <= options.tolerance)])[0]


def show(options: argparse.Namespace, losses: list[float], used: list[float], theirs: Any) -> None:
    """Print the peak of each worker, and the last loss."""
    table = Table("beyond the memory of torch itself", "limit", "peak", "last loss")
    limit = f"{options.limit_mb} MB"
    table.add_row("one worker", limit, "out of memory", "")
    for rank, mb in enumerate(used):
        table.add_row(f"worker {rank} of {len(used)}", limit, f"{mb:.0f} MB", f"{losses[-1]:.6f}")
    if theirs is not None:
        table.add_row(
            "one worker", "none", f"{theirs['used_mb']:.0f} MB", f"{theirs['losses'][-1]:.6f}"
        )
    Console().print(table)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {text}")
    return int(text)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=positive, default=128, help="cells per side of the volume, a multiple of 8")
    add("--width", type=positive, default=8, help="channels of the first level, a multiple of 4")
    add("--steps", type=positive, default=5)
    add("--grid", type=positive, nargs=5, default=[1, 1, 2, 2, 1], help="grid of workers")
    add("--limit-mb", type=int, default=1000, help="memory of a process beyond torch's own")
    add("--compare", action="store_true", help="train one worker without a limit too")
    add("--tolerance", type=float, default=1e-3, help="largest relative difference of a loss")
    add("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size % 8 or options.width % 4:
        parser.error("--size must be a multiple of 8, and --width of 4")
    return options


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    if options.alone:
        is_on_gpu = torch.cuda.is_available()
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        return alone(options, torch.device("cuda", rank) if is_on_gpu else torch.device("cpu"))
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
