"""Compare losses and accuracies of the distributed network with those of the sequential one."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

COMPARED_STEPS = 50
LOSS_BOUND = 1e-9


@dataclass
class Result:
    """Result of a training: accuracy in percent of the test images, losses, median step time."""

    accuracy: float
    loss: list[float]
    seconds_per_step: float


def largest_difference(ours: Result, theirs: Result, steps: int | None = None) -> float:
    """Return the largest relative difference of the first ``steps`` losses.

    The difference is infinite if a loss is NaN.
    """
    pairs = zip(ours.loss[:steps], theirs.loss[:steps], strict=True)
    relative = [abs(a - b) / abs(b) if b else abs(a) for a, b in pairs]
    return max((math.inf if math.isnan(r) else r for r in relative), default=0.0)


def disagreements(ours: Result, theirs: Result, dtype: torch.dtype, tolerance: float) -> list[str]:
    """List the differences that exceed rounding errors.

    Args:
        ours: result of the distributed network.
        theirs: result of the sequential network.
        dtype: precision of the training; losses are compared in float64 only.
        tolerance: largest difference of the accuracies, in percentage points.
    """
    found = []
    difference = largest_difference(ours, theirs, COMPARED_STEPS)
    if dtype == torch.float64 and difference > LOSS_BOUND:
        found.append(
            f"a loss of the first {COMPARED_STEPS} steps differs by {difference:.2e} of its value, "
            f"more than {LOSS_BOUND:g}"
        )
    points = abs(ours.accuracy - theirs.accuracy)
    if points > tolerance:
        found.append(f"the accuracies differ by {points:.2f} points, more than {tolerance:g}")
    return found


def show_results(ours: Result, theirs: Result | None) -> None:
    """Print both trainings side by side, on standard output."""
    results = [ours] if theirs is None else [ours, theirs]
    table = Table("", *("distributed", "sequential")[: len(results)])
    table.add_row("accuracy", *(f"{result.accuracy:.2f} %" for result in results))
    table.add_row("last loss", *(f"{result.loss[-1]:.6f}" for result in results))
    table.add_row("time per step", *(f"{1e3 * r.seconds_per_step:.1f} ms" for r in results))
    Console().print(table)
    if theirs is not None:
        steps = len(ours.loss)
        first = min(COMPARED_STEPS, steps)
        print(
            f"largest relative difference of a loss: {largest_difference(ours, theirs, first):.1e} "
            f"in the first {first} steps, {largest_difference(ours, theirs):.1e} in all {steps}"
        )


def verdict(
    ours: dict[str, list[float]], theirs: dict[str, list[float]] | None, tolerance: float
) -> list[str]:
    """Print the last value of every series side by side, and return what differs too much.

    Args:
        ours: series by name, such as the losses of all steps, of the distributed program.
        theirs: those of the sequential one; ``None`` if it did not run.
        tolerance: largest difference of any value of a series.
    """
    table = Table("", "distributed", *([] if theirs is None else ["sequential", "difference"]))
    found: list[str] = []
    for name, values in ours.items():
        row = [name, f"{values[-1]:.6f}"]
        if theirs is not None:
            pairs = zip(values, theirs[name], strict=True)
            apart = max((math.inf if math.isnan(a - b) else abs(a - b) for a, b in pairs))
            row += [f"{theirs[name][-1]:.6f}", f"{apart:.1e}"]
            if apart > tolerance:
                found.append(f"{name} differs by {apart:.1e}, more than {tolerance:g}")
        table.add_row(*row)
    Console().print(table)
    return found


def write_json(path: Path, ours: Result, theirs: Result | None, facts: dict[str, Any]) -> None:
    """Write both results, with ``facts`` about the run; nulls without a sequential result."""
    record = {
        "accuracy": ours.accuracy,
        "sequential_accuracy": theirs and theirs.accuracy,
        "loss": ours.loss,
        "sequential_loss": theirs.loss if theirs else [],
        "seconds_per_step": ours.seconds_per_step,
        "sequential_seconds_per_step": theirs and theirs.seconds_per_step,
        "torch": torch.__version__,
        **facts,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@contextmanager
def progress(name: str, steps: int, is_shown: bool) -> Iterator[Callable[[float], None]]:
    """Yield a function to call with every step's loss: a bar on a terminal, else ten lines."""
    done = 0

    def print_line(loss: float) -> None:
        nonlocal done
        done += 1
        if done % max(1, steps // 10) == 0 or done == steps:
            print(f"{name}: step {done} of {steps}, loss {loss:.4f}", file=sys.stderr, flush=True)

    if not is_shown:
        yield lambda loss: None
    elif not sys.stderr.isatty():
        yield print_line
    else:
        columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.4f}"))
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=steps, loss=math.nan)
            yield lambda loss: bar.update(task, advance=1, loss=loss)
