"""Write RESULTS.md: predicted and measured memory, and their ratio."""

# The lines of the page are longer.
# ruff: noqa: E501

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
_H200 = HERE.parent / "results" / "gpu" / "h200_87e8f5fd" / "unet_step.jsonl"
MIB = 1 << 20
_TEXT = """\
# Predicted memory

`gpudist plan` counts the bytes of the tensors that are alive in a training step without data. Here are its predictions
beside real steps: forward, cross entropy, backward and update, without dropout. `predicted.json` was committed before the first
measurement; no number in it is fitted to one.

## Two ranks on CPUs

Live is the peak of the bytes of all tensors in the second step, on the rank that needs more. Resident is the peak of the
process above the memory after its imports; it also has Python's objects, the workspaces of kernels, gpudist's
cache of freed memory, and the sequential network that was converted. Each network ran in processes of its own.

{cpu}

A first measurement recorded operations by a mode under which layers compute in steps that torch can differentiate, and keep
more than in training: predictions of the two U-Nets seemed 20 and 24 % too low. That measurement is replaced, the predictions
are those made before it.

## One NVIDIA H200

The peak that CUDA's allocator reported for the steps of `UNet3d(1, 3, 16)` in float32, contiguous, in a world of one
([rows](../results/gpu/h200_87e8f5fd/README.md)). A like measurement was read before this prediction was made.

{gpu}

```console
$ python -m benchmarks.memory predict
$ python -m benchmarks.memory measure
$ python -m benchmarks.memory page
```
"""


def page() -> str:
    """Return the page, from the files beside it and the rows of the GPU."""
    predicted, measured = (
        json.loads((HERE / f"{name}.json").read_text()) for name in ("predicted", "measured")
    )
    cpu = [
        (name, predicted[name]["total"] / MIB, one["live"] / MIB, one["resident"] / MIB)
        for name, one in measured.items()
    ]
    peaks = _gpu_peaks()
    gpu = [
        (f"{side}^3", predicted[f"H200, {side}^3"]["total"] / MIB, peaks[side])
        for side in sorted(peaks)
    ]
    cpu_rows = [
        (n, f"{p:.1f}", f"{live:.1f}", f"{p / live:.3f}", f"{r:.0f}") for n, p, live, r in cpu
    ]
    gpu_rows = [(n, f"{p:.1f}", f"{m:.1f}", f"{p / m:.3f}") for n, p, m in gpu]
    heading = ("network", "predicted MiB", "live MiB", "predicted / live", "resident MiB")
    other = ("cells", "predicted MiB", "measured MiB", "predicted / measured")
    return _TEXT.format(cpu=_table(heading, cpu_rows), gpu=_table(other, gpu_rows))


def write_page() -> None:
    """Write RESULTS.md."""
    PAGE.write_text(page(), encoding="utf-8")


def _gpu_peaks() -> dict[int, float]:
    found: dict[int, float] = {}
    for line in _H200.read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        side, _, rest = row.get("case", "").partition("^3, ")
        if rest == "fp32, contiguous, eager":
            found[int(side)] = row["peak_mib"]
    return found


def _table(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    line = ["---", *("---:" for _ in heading[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heading, line, *rows))
