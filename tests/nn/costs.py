"""Exact costs of every layer of ``LAYERS`` on the grids of its contract, in a table.

``python -m tests.nn.costs --write`` writes the table; without it, the program compares the layers
with the table, and fails if one sends, keeps or holds in flight more than it says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.progress import track
from torch.autograd.graph import saved_tensors_hooks

import gpudist
from gpudist.errors import PartitionError, ShapeError
from gpudist.nn.layer_table import LAYERS, Layer
from gpudist.testing import run_distributed
from gpudist.transport.flight_recorder import Observer, Operation, Phase, Post
from gpudist.world.partition import Partition
from tests.nn.contract import Grid, Pair, Untold, grids

TABLE = Path(__file__).with_suffix(".jsonl")
PACKAGE = str(Path(gpudist.__file__).parent)


@dataclass(frozen=True)
class Costs:
    """Sums over ranks for the second call of a layer, after agreements; the first of double ones.

    Attributes:
        messages, size_bytes: messages sent, and their bytes: of forward, backward, and
            double backward from the gradient of the first input to that of the output.
        in_flight: largest number of operations that a rank has started and not ended, in each.
        kept_bytes: bytes that autograd keeps after forward, without inputs and parameters.
        frames: calls of gpudist's Python functions in forward on the first rank; not compared.
    """

    messages: list[int]
    size_bytes: list[int]
    in_flight: list[int]
    kept_bytes: int
    frames: int

    def excess(self, before: Costs) -> list[str]:
        """Describe what is more than before."""
        return [
            f"{field.name}: {now}, in the table {then}"
            for field in fields(self)
            if field.name != "frames"
            for now, then in [(getattr(self, field.name), getattr(before, field.name))]
            if any(a > b for a, b in zip(*map(_listed, (now, then)), strict=True))
        ]


def _listed(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


class _Pass(Observer):
    """Observer of one pass on this rank."""

    def __init__(self) -> None:
        self.messages = self.size_bytes = self.in_flight = 0
        self._open: set[int] = set()

    def begin_call(self, operation: Operation, phase: Phase) -> None:
        self._open.add(id(operation))
        self.in_flight = max(self.in_flight, len(self._open))

    def post_message(self, operation: Operation, post: Post, number: int) -> None:
        self.messages += post.kind != "receive"
        self.size_bytes += post.sent_bytes

    def end_call(self, operation: Operation) -> None:
        if operation[2] is not None:
            self._open.discard(id(operation))


@contextmanager
def _observed(P_world: Partition, passes: list[_Pass]) -> Iterator[None]:
    seen = _Pass()
    recorders = [wire.recorder for wire in P_world.wire.wires]
    for recorder in recorders:
        recorder.observe(seen)
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.ignore(seen)
    passes.append(seen)


class _Kept(saved_tensors_hooks):
    def __init__(self, held: list[torch.Tensor]) -> None:
        self._sizes: dict[int, int] = {}
        self._held = {x.untyped_storage().data_ptr() for x in held}
        super().__init__(self._pack, lambda x: x)

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._held:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return x

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())


def _frames(call: Any) -> tuple[Any, int]:
    """Return the result, and how many functions of gpudist were called on this thread."""
    count = 0

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(on_call)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, count


def _on_rank(P_world: Partition, row: Layer, shape: Grid) -> Costs | str:
    try:
        pair = Pair(row, P_world.create_cartesian_topology_partition(shape))
        pair.run_one(pair.layer, pair.blocks)
    except (PartitionError, ShapeError, Untold) as error:
        return f"{type(error).__name__}: {error}"
    passes: list[_Pass] = []
    kept = _Kept([*pair.blocks, *pair.layer.parameters()])
    with _observed(P_world, passes), kept:
        y = pair.run_one(pair.layer, pair.blocks)
    needing = [x for x in (*pair.blocks, *pair.layer.parameters()) if x.requires_grad]
    ones = torch.ones_like(y, requires_grad=True)
    with _observed(P_world, passes):
        torch.autograd.grad(y, needing, ones, allow_unused=True)
    back = _first_gradient(pair, ones)
    with _observed(P_world, passes):
        if back is not None:
            # Torch's fused attention has no double backward.
            with _where_torch_can():
                torch.autograd.grad(back, ones, torch.ones_like(back))
    with torch.no_grad():
        _, frames = _frames(lambda: pair.run_one(pair.layer, pair.blocks))
    return Costs(
        [each.messages for each in passes], [each.size_bytes for each in passes],
        [each.in_flight for each in passes], kept.nbytes, frames,
    )  # fmt: skip


@contextmanager
def _where_torch_can() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise


def _first_gradient(pair: Pair, w: torch.Tensor) -> torch.Tensor | None:
    # ``None`` unless the gradient of the first input depends on that of the output, ``w``.
    x = pair.blocks[0]
    if not x.requires_grad:
        return None
    (back,) = torch.autograd.grad(pair.run_one(pair.layer, pair.blocks), x, w, create_graph=True)
    return back if back.requires_grad else None


def costs(row: Layer, shape: Grid) -> Costs | str:
    """Return the costs on a grid, or the text with which all ranks refuse it."""
    by_rank = run_distributed(_on_rank, prod(shape), row, shape, timeout=30.0)
    if isinstance(by_rank[0], str):
        return by_rank[0]
    messages, size_bytes, in_flight = (
        [over_ranks(getattr(each, name)[i] for each in by_rank) for i in range(3)]
        for name, over_ranks in (("messages", sum), ("size_bytes", sum), ("in_flight", max))
    )
    kept_bytes = sum(each.kept_bytes for each in by_rank)
    return Costs(messages, size_bytes, in_flight, kept_bytes, by_rank[0].frames)


def read_table() -> dict[tuple[str, Grid], Costs | str]:
    """Return the rows of the table, by layer and grid."""
    rows: dict[tuple[str, Grid], Costs | str] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        about = row["costs"]
        key = row["layer"], tuple(row["grid"])
        rows[key] = about if isinstance(about, str) else Costs(**about)
    return rows


def compare(row: Layer, shape: Grid, before: Costs | str) -> list[str]:
    """Describe what a layer does otherwise, or needs more of, than the table says."""
    now = costs(row, shape)
    if isinstance(now, Costs) and isinstance(before, Costs):
        return now.excess(before)
    return [] if now == before else [f"{now}, in the table {before}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nn.costs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--frames", action="store_true", help="list rows with more Python frames")
    options = parser.parse_args()
    cases = [(row, shape) for row in LAYERS for shape in grids(row, every=False)]
    if options.write:
        lines = []
        for row, shape in track(cases, transient=True):
            about = costs(row, shape)
            said = about if isinstance(about, str) else asdict(about)
            line = {"layer": row.name, "grid": shape, "costs": said}
            lines.append(json.dumps(line, separators=(",", ":")))
        TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return 0
    table, worse = read_table(), 0
    for row, shape in track(cases, transient=True):
        before = table[row.name, shape]
        for text in compare(row, shape, before):
            worse += 1
            print(f"{row.name} on {list(shape)}: {text}")
        if options.frames and isinstance(before, Costs):
            now = costs(row, shape)
            if isinstance(now, Costs) and now.frames > before.frames:
                print(f"{row.name} on {list(shape)}: frames {now.frames}, were {before.frames}")
    print(f"{len(cases)} rows, {worse} worse")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
