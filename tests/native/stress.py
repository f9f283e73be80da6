"""Random plans through the native core, against plain loops, in every bit.

``python -m tests.native.stress --plans 10000 --seed 1``
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from gpudist.exchange import Movement, bind, carry_out
from gpudist.geometry import Plan, Stage
from gpudist.testing.rank_pool import RankPool
from gpudist.world.partition import Partition
from tests.geometry import oracle
from tests.native.plans import Operation, draw

RANKS = 8


def carry_out_random(
    P_world: Partition,
    seed: int,
    first: int,
    count: int,
    sizes: Sequence[int] = (1, 1, 2, 3),
) -> Counter[str]:
    """Carry out groups of random operators; return how often each occurred. Collective."""
    met: Counter[str] = Counter()
    for number in range(first, first + count):
        rng = random.Random(f"{seed}/{number}")
        together = [draw(rng, P_world.size) for _ in range(rng.choice(sizes))]
        _carry_out(P_world, together, f"seed {seed}, plan {number}", number % P_world.size)
        met.update(operation.name for operation in together)
        met["groups"] += 1
    return met


def _carry_out(P_world: Partition, together: list[Operation], name: str, judge: int) -> None:
    movements: list[Movement] = []
    mine: list[torch.Tensor] = []
    expected: list[torch.Tensor | None] = []
    for operation in together:
        partition = P_world.create_partition_inclusive(operation.ranks)
        inputs = operation.inputs()
        outputs = operation.outputs(inputs)
        if operation.whole and P_world.rank == judge:
            _assert_oracle_agrees(operation, inputs, outputs, name)
        rank = partition.rank
        x = inputs[rank] if rank is not None else None
        x = x if x is not None else torch.empty(0, dtype=operation.dtype)
        if rank is not None:
            plan = operation.plans[rank]
        else:
            first = operation.plans[0]
            empty = tuple(Stage(None, None) for _ in first.stages)
            plan = Plan(first.key, -1, empty, first.transposed)
        movements.append(
            bind(plan, partition, operation.name, operation.dtype, x.shape, x.dtype,
                 fill=operation.fill)
        )  # fmt: skip
        mine.append(x)
        expected.append(outputs[rank] if rank is not None else None)
    before = [x.clone() for x in mine]
    results = carry_out(movements, mine)
    for operation, x, untouched, y, wanted in zip(
        together, mine, before, results, expected, strict=True
    ):
        where = f"{name}: {operation.name} of {operation.dtype}, rank {P_world.rank}"
        assert torch.equal(x, untouched), f"{where}: the input has changed"
        if wanted is None:
            assert y.numel() == 0, where
            continue
        assert y.shape == wanted.shape and y.dtype == wanted.dtype, where
        assert _bits(y) == _bits(wanted), f"{where}: {y} != {wanted}"


def _assert_oracle_agrees(
    operation: Operation,
    inputs: list[torch.Tensor | None],
    outputs: list[torch.Tensor | None],
    name: str,
) -> None:
    """The oracle of the geometry, which knows integers only, where cells are not filled."""
    if operation.fill:
        return
    found = oracle.carry_out(operation.plans, [_integers(x) for x in inputs])
    for rank, (mine, theirs) in enumerate(zip(outputs, found, strict=True)):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            wrapped = torch.from_numpy(np.ascontiguousarray(theirs)).to(mine.dtype)
            assert torch.equal(mine, wrapped.reshape(mine.shape)), f"{name}, oracle, rank {rank}"


def _integers(x: torch.Tensor | None) -> oracle.Array | None:
    return None if x is None else (x.real if x.is_complex() else x).to(torch.int64).numpy()


def _bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=RANKS)
    options = parser.parse_args()
    start_s = time.monotonic()
    met: Counter[str] = Counter()
    with RankPool(options.ranks) as pool:
        for first in range(0, options.plans, 250):
            count = min(250, options.plans - first)
            every = pool.run(
                options.ranks, carry_out_random, (options.seed, first, count), limit_s=600,
                transport="host",
            )  # fmt: skip
            met += every[0]
            print(f"{first + count} groups, {time.monotonic() - start_s:.0f} s", flush=True)
    groups = met.pop("groups")
    for name, count in sorted(met.items()):
        print(f"{count:7d} {name}")
    print(
        f"{groups} groups of {met.total()} operators on {options.ranks} ranks, bitwise as expected"
    )


if __name__ == "__main__":
    main()
