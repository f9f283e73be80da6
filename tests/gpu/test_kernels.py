"""Random launches of the kernel that packs, unpacks, adds and fills, against torch's indexing.

A launch has up to 120 boxes of a tensor; the cells of each are runs of a flat tensor. All memory
around is compared too, so that a write beyond a box is noticed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from benchmarks.gpu.kernel import bound
from gpudist.geometry.boxes import Box, contiguous_strides
from gpudist.transport.nccl.program import (
    BufferName,
    BufferView,
    CombineJob,
    Lowered,
)
from gpudist.world.partition import Partition
from tests.gpu.devices import require_gpu
from tests.gpu.layouts import DTYPES, Layout, all_memory
from tests.gpu.operators import integers
from tests.gpu.worlds import OneRank

require_gpu()

KINDS = ("pack", "unpack", "add", "sum", "fill")
ROUNDS, PER_ROUND = 4, 20
LONGEST = (20_000, 200, 40, 14, 9, 6)
FILL = 3.0


@dataclass(frozen=True)
class Launch:
    """Randomly drawn launch.

    Attributes:
        kind: direction of the launch: runs are copied into boxes, boxes into runs, runs are added
            to boxes or summed into them, or boxes are filled with a constant.
        boxes: boxes of a tensor of ``shape``, which do not overlap.
        runs: where each box's cells begin in a flat tensor, once for each summand.
        flat_items: length of the flat tensor, from ``flat_offset`` on.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout
    boxes: list[Box]
    runs: list[list[int]]
    flat_offset: int
    flat_items: int

    @classmethod
    def drawn(cls, kind: str, draw: random.Random) -> Launch:
        dims = draw.randint(1, len(LONGEST))
        grain = draw.choice((1, 1, 2, 4, 16))
        shape = [draw.randint(1, LONGEST[dims - 1]) for _ in range(dims)]
        shape[-1] = -(-shape[-1] // grain) * grain
        boxes = _disjoint(draw, Box.whole(tuple(shape)), grain)
        runs, end = [], 0
        for box in boxes:
            starts = []
            for _ in range(draw.randint(2, 4) if kind == "sum" else draw.randint(1, 3)):
                starts.append(end + grain * draw.randrange(3))
                end = starts[-1] + box.volume
            runs.append(starts)
        adds = kind in ("add", "sum")
        dtype = draw.choice([dtype for dtype in DTYPES if not adds or dtype != torch.bool])
        layout = Layout.drawn(draw, dims, grain)
        return cls(kind, dtype, tuple(shape), layout, boxes, runs, grain * draw.randrange(8), end)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        return Layout((0,), (1,), self.flat_offset).of(values)

    def jobs(self, strides: tuple[int, ...]) -> list[CombineJob]:
        """Return jobs for the kernel; ``strides`` are those of the tensor."""
        return [self._job(box, starts, strides) for box, starts in self._each()]

    def carry_out(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        """The same by torch."""
        for box, starts in self._each():
            cells = tensor[box.slices]
            runs = [flat[start : start + box.volume].view(box.shape) for start in starts]
            if self.kind == "pack":
                runs[0].copy_(cells)
            elif self.kind == "fill":
                cells.fill_(FILL)
            else:
                first, *others = [cells, *runs] if self.kind == "add" else runs
                cells.copy_(first)
                for run in others if self.kind != "unpack" else ():
                    cells.add_(run)

    def _each(self) -> list[tuple[Box, list[int]]]:
        return list(zip(self.boxes, self.runs, strict=True))

    def _job(self, box: Box, starts: list[int], strides: tuple[int, ...]) -> CombineJob:
        names: tuple[BufferName, BufferName] = ("output", "input")
        of_tensor, of_flat = reversed(names) if self.kind == "pack" else names
        first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
        cells = BufferView(of_tensor, first, strides)
        runs = [BufferView(of_flat, start, contiguous_strides(box.shape)) for start in starts]
        if self.kind == "pack":
            return CombineJob(box.shape, runs[0], (cells,))
        summands = {"unpack": runs[:1], "add": [cells, *runs], "sum": runs, "fill": []}
        return CombineJob(box.shape, cells, tuple(summands[self.kind]))


def _disjoint(draw: random.Random, whole: Box, grain: int) -> list[Box]:
    """Boxes that are cut out of a whole, in the last dim at multiples of ``grain``; not all."""
    boxes = [whole]
    for _ in range(draw.choice((0, 1, 4, 15, 60, 150))):
        box = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(box.shape))
        step = grain if dim == len(box.shape) - 1 else 1
        places = range(box.start[dim] + step, box.stop[dim], step)
        if not places:
            boxes.append(box)
            continue
        cut = draw.choice(places)
        low, high = list(box.stop), list(box.start)
        low[dim] = high[dim] = cut
        boxes += [Box(box.start, tuple(low)), Box(tuple(high), box.stop)]
    return draw.sample(boxes, -(-len(boxes) * 4 // 5))


def compare(P_world: Partition, kind: str, seed: int) -> None:
    drawn = Launch.drawn(kind, random.Random(f"{kind} {seed}"))
    values = integers(drawn.shape, seed, drawn.dtype)
    flat_values = integers((drawn.flat_items,), seed + 1, drawn.dtype)
    tensor, flat = drawn.layout.of(values), drawn.flat(flat_values)
    found = drawn.layout.of(values.to(P_world.device))
    found_flat = drawn.flat(flat_values.to(P_world.device))
    drawn.carry_out(tensor, flat)
    source, target = (found, found_flat) if kind == "pack" else (found_flat, found)
    lowered = Lowered(drawn.dtype, after=drawn.jobs(found.stride()))
    assert bound(P_world, lowered, source, lambda: target, fill=FILL)() is target
    assert torch.equal(all_memory(found).cpu(), all_memory(tensor)), (seed, drawn)
    assert torch.equal(all_memory(found_flat).cpu(), all_memory(flat)), (seed, drawn)


@pytest.mark.parametrize("round_of_seeds", range(ROUNDS))
@pytest.mark.parametrize("kind", KINDS)
def test_random_launches(one_rank: OneRank, kind: str, round_of_seeds: int) -> None:
    first = PER_ROUND * round_of_seeds
    for seed in range(first, first + PER_ROUND):
        one_rank.run(compare, kind=kind, seed=seed)
