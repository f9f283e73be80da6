"""Poisson's equation on a grid of workers, in CuPy arrays on GPUs, else in NumPy arrays.

    torchrun --standalone --nproc-per-node 4 examples/jacobi_cupy.py --grid 255 --compare

Solves -(u_xx + u_yy) = f on the unit square with u = 0 on its edge, for the f whose solution is
u(x, y) = p(x) p(y), p(x) = x (1 - x) exp(x). Second differences on --grid points a side, solved by
Jacobi's iteration with Chebyshev's acceleration (Golub & Varga 1961): a step needs only the
outermost points of the neighbours.

It runs on any number of workers, including one without a launcher. Each worker holds a block of the
grid, receives its ghosts by gpudist.halo_exchange, and sums norms by gpudist.all_sum_reduce. The
equation is also solved on half as many points a side, to measure the order of convergence, which is
2.

--compare also solves the same problem in NumPy on rank 0 alone, and exits with 1 unless the fields
are bitwise equal: at each point, the same numbers are added in the same order.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpudist
from gpudist import CartesianPartition, Partition
from gpudist.geometry import Decomposition

# Each step removes 3 % of the error at 100 points a side; 8 steps a point leave 1e-10 of it.
STEPS_PER_POINT = 8
# Time that the other workers wait for rank 0, which solves alone.
TIMEOUT_S = 3600.0

Report = Callable[[int, float], None]


class Poisson:
    """A block of the equation on ``grid`` x ``grid`` points inside the unit square.

    Args:
        grid: points a side.
        rows, columns: ranges of the block's rows and columns.
        xp: numpy or cupy.

    Attributes:
        source: ``h^2 f`` at each point of the block, where ``h`` is the spacing.
        solution: ``u`` at each point of the block.
    """

    def __init__(self, grid: int, rows: slice, columns: slice, xp: Any) -> None:
        self.grid, self.spacing = grid, 1 / (grid + 1)
        # All workers compute the same table, so that results do not depend on the start of a block.
        x = np.arange(1, grid + 1) * self.spacing
        p, minus_p_xx = x * (1 - x) * np.exp(x), x * (x + 3) * np.exp(x)
        f = np.outer(minus_p_xx[rows], p[columns]) + np.outer(p[rows], minus_p_xx[columns])
        self.source = xp.asarray(f * self.spacing**2)
        self.solution = xp.asarray(np.outer(p[rows], p[columns]))


@dataclass
class Workers:
    """Communication of a block with the others.

    Attributes:
        with_ghosts: returns the block with one more point on each side: the neighbours' points, or
            zeros at the edge.
        total: returns the sum of one number per worker, as a 1 x 1 array.
    """

    with_ghosts: Callable[[Any], Any]
    total: Callable[[Any], Any]

    @classmethod
    def of(cls, P: CartesianPartition, grid: int) -> Workers:
        return cls(
            partial(gpudist.halo_exchange, P_x=P, halo=((1, 1), (1, 1)), global_shape=(grid, grid)),
            partial(gpudist.all_sum_reduce, P_x=P, axes_reduce=(0, 1)),
        )

    @classmethod
    def alone(cls) -> Workers:
        return cls(lambda u: np.pad(u, 1), lambda number: number)

    def norm(self, u: Any) -> float:
        """Return the root of the sum of squares of all points, the same on all workers."""
        return math.sqrt(self.total((u * u).sum(keepdims=True)).item())


@dataclass
class Result:
    """The block of the field, its relative residual and error, and the time of a step."""

    field: Any
    residual: float
    error: float
    seconds_per_step: float


def solve(problem: Poisson, workers: Workers, steps: int, report: Report) -> Result:
    """Take ``steps`` iterations from zero; report the residual after every tenth of them."""
    u = previous = 0 * problem.source
    source_norm, residual = workers.norm(problem.source), math.nan
    # The first call creates plans, and is not timed.
    workers.with_ghosts(u)
    start_s = time.perf_counter()
    for step, weight in enumerate(chebyshev_weights(problem.spacing, steps), start=1):
        jacobi = (neighbours(workers.with_ghosts(u)) + problem.source) * 0.25
        u, previous = (jacobi - previous) * weight + previous, u
        if step % max(1, steps // 10) == 0 or step == steps:
            defect = neighbours(workers.with_ghosts(u)) + problem.source - 4 * u
            residual = workers.norm(defect) / source_norm
            report(step, residual)
    # The last norm has waited for the GPU.
    seconds = time.perf_counter() - start_s
    error = workers.norm(u - problem.solution) * problem.spacing
    return Result(u, residual, error, seconds / steps)


def neighbours(u: Any) -> Any:
    """Return the sum of each point's four neighbours; ``u`` has one more point on each side."""
    return (u[:-2, 1:-1] + u[2:, 1:-1]) + (u[1:-1, :-2] + u[1:-1, 2:])


def chebyshev_weights(spacing: float, steps: int) -> Iterator[float]:
    """Yield every step's weight, for eigenvalues of Jacobi's iteration within ``cos(pi h)``."""
    square = math.cos(math.pi * spacing) ** 2
    weight = 1.0
    for step in range(steps):
        yield weight
        weight = 1 / (1 - square / 2) if step == 0 else 1 / (1 - square * weight / 4)


def process_grid(size: int) -> tuple[int, int]:
    """Return the squarest grid of ``size`` workers with at most as many rows as columns."""
    rows = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    return rows, size // rows


def array_library(device: torch.device) -> Any:
    """Return cupy if the workers' device is a GPU, else numpy."""
    if device.type != "cuda":
        return np
    import cupy  # pyright: ignore[reportMissingImports]

    return cupy


def distributed(P: CartesianPartition, grid: int, steps: int, report: Report) -> Result:
    """Solve on all workers of ``P``."""
    assert P.index is not None
    rows, columns = Decomposition.balanced((grid, grid), P.shape).block(P.index).slices
    problem = Poisson(grid, rows, columns, array_library(P.device))
    return solve(problem, Workers.of(P, grid), steps, report)


def alone(grid: int, steps: int, report: Report) -> Result:
    """Solve on this worker, in NumPy."""
    problem = Poisson(grid, slice(None), slice(None), np)
    return solve(problem, Workers.alone(), steps, report)


def difference(ours: np.ndarray, theirs: np.ndarray) -> str | None:
    """Describe how two fields differ; ``None`` if they are bitwise equal."""
    if ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes():
        return None
    if ours.shape != theirs.shape:
        return f"their shapes are {ours.shape} and {theirs.shape}"
    wrong = np.argwhere(ours.view(np.int64) != theirs.view(np.int64))
    return (
        f"{len(wrong)} of {ours.size} points differ, the first at {wrong[0].tolist()}, by up to "
        f"{np.abs(ours - theirs).max():.2e}"
    )


@contextmanager
def progress(name: str, steps: int, is_shown: bool) -> Iterator[Report]:
    """Yield a function to call with steps and residual; it shows a bar with rich, else lines."""
    if not is_shown:
        yield lambda done, residual: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, TextColumn
    except ImportError:
        is_bar = False
    else:
        is_bar = sys.stderr.isatty()
    if not is_bar:
        yield lambda done, residual: print(
            f"{name}: step {done} of {steps}, residual {residual:.2e}", file=sys.stderr, flush=True
        )
        return
    columns = (*Progress.get_default_columns(), TextColumn("residual {task.fields[residual]:.2e}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=steps, residual=math.nan)
        yield lambda done, residual: bar.update(task, completed=done, residual=residual)


def whole(field: Any, P: CartesianPartition) -> np.ndarray | None:
    """Return the field on rank 0, in NumPy."""
    gathered = gpudist.gather(field, P)
    if P.rank != 0:
        return None
    return gathered.get() if P.device.type == "cuda" else gathered


def run(P_world: Partition, options: argparse.Namespace) -> dict[str, Any]:
    """Solve on all workers and, with --compare, alone; only rank 0 has all facts."""
    P = P_world.grid(process_grid(P_world.size))
    grid, steps, is_first = options.grid, options.steps, P_world.rank == 0
    coarse_grid = grid // 2
    with progress("on all workers", steps, is_first) as report:
        ours = distributed(P, grid, steps, report)
    coarse_steps = max(1, round(steps * coarse_grid / grid))
    coarse = distributed(P, coarse_grid, coarse_steps, lambda done, residual: None)
    ratio = (grid + 1) / (coarse_grid + 1)
    facts: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "grid": grid,
        "steps": steps,
        "ranks": P.size,
        "process_grid": P.shape,
        "transport": P.transport,
        "arrays": type(ours.field).__module__,
        "residual": ours.residual,
        "error": ours.error,
        "coarse_grid": coarse_grid,
        "coarse_error": coarse.error,
        "order": math.log(coarse.error / ours.error) / math.log(ratio),
        "seconds_per_step": ours.seconds_per_step,
        "sequential_seconds_per_step": None,
        "difference": None,
    }
    field = whole(ours.field, P)
    if options.compare and field is not None:
        with progress("alone", steps, True) as report:
            theirs = alone(grid, steps, report)
        facts["sequential_seconds_per_step"] = theirs.seconds_per_step
        facts["difference"] = difference(field, theirs.field)
    return facts


def show(facts: dict[str, Any], is_compared: bool) -> None:
    rows, columns = facts["process_grid"]
    print(
        f"{facts['grid']} x {facts['grid']} points on {rows} x {columns} workers, {facts['arrays']}"
        f" over {facts['transport']}: {facts['steps']} steps of "
        f"{1e6 * facts['seconds_per_step']:.0f} us, relative residual {facts['residual']:.1e}\n"
        f"error to the solution {facts['error']:.3e}, {facts['coarse_error']:.3e} on "
        f"{facts['coarse_grid']} x {facts['coarse_grid']}: order {facts['order']:.3f}"
    )
    if is_compared and facts["difference"] is None:
        print(
            "every bit is that of the field solved alone, at a time per step of "
            f"{1e6 * facts['sequential_seconds_per_step']:.0f} us"
        )


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {text}")
    return int(text)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--grid", type=positive, default=127, help="points a side, inside the square")
    add(
        "--steps",
        type=positive,
        help=f"iterations; default: {STEPS_PER_POINT} per point a side",
    )
    add("--compare", action="store_true", help="solve alone too, on rank 0")
    add("--json", type=Path, metavar="FILE", help="write errors, residual and times")
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: the directory does not exist")
    options.steps = options.steps or STEPS_PER_POINT * options.grid
    return options


def main() -> int:
    options = read_options()
    P_world = gpudist.init(TIMEOUT_S)
    needed = 2 * max(process_grid(P_world.size))
    if options.grid < needed:
        print(
            f"jacobi_cupy.py, rank {P_world.rank} of {P_world.size}: --grid {options.grid} leaves "
            f"workers without points; it must be at least {needed}",
            file=sys.stderr,
            flush=True,
        )
        # The launcher ends the other workers when one exits.
        P_world.barrier()
        return 2
    facts = run(P_world, options)
    if P_world.rank == 0:
        show(facts, options.compare)
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        if facts["difference"]:
            print(f"jacobi_cupy.py: the fields differ: {facts['difference']}", file=sys.stderr)
    return P_world.broadcast_data([facts["difference"] is not None])[0]


if __name__ == "__main__":
    sys.exit(main())
