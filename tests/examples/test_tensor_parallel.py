"""The example of a GPT on rows of workers: in a pool, and as a user starts it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch

from gpudist.world.partition import Partition
from tests.examples import trainers
from tests.pool import distributed

trainers.needs()

SMALL = ("--width", 12, "--heads", 4, "--layers", 2, "--samples", 2, "--longest", 75)
ONE_ROW = ("--data-parallel", 1, "--tensor-parallel", 4)


def run(P_world: Partition, *arguments: object) -> int:
    example = trainers.module("tensor_parallel")
    return example.run(P_world, example.read_options([str(each) for each in arguments]))


def assert_sequential(file: Path, grid: list[int], steps: int) -> None:
    """Check the record of a comparison in float64."""
    record = json.loads(file.read_text())
    assert record["grid"] == grid
    assert len(record["loss"]) == len(record["sequential_loss"]) == steps
    np.testing.assert_allclose(record["loss"], record["sequential_loss"], rtol=1e-9, atol=0)
    assert 0 <= record["loss_difference"] < 1e-9 and 0 <= record["parameter_difference"] < 1e-9
    # Other lengths at each step, and blocks of the sequence that are not even.
    assert len(set(record["lengths"])) == steps
    assert any(length % grid[1] for length in record["lengths"])
    assert max(record["parameters"]) < 0.9 * record["all_parameters"]


@pytest.mark.parametrize(
    "how",
    [
        (),
        ("--sequence-parallel",),
        ("--attention", "ring"),
        ("--attention", "all-to-all"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("grid", [[2, 2], [1, 4]], ids=str)
@distributed(ranks=4, transports=("host",))
def test_equals_the_sequential_network(
    P_world: Partition, grid: list[int], how: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    rows = ONE_ROW if grid == [1, 4] else ()
    steps = ("--steps", 3, "--seed", 1)
    assert run(P_world, *SMALL, *steps, *rows, *how, "--compare", "--json", file) == 0
    if P_world.rank == 0:
        assert_sequential(file, grid, 3)


@distributed(ranks=4, transports=("host",))
def test_the_first_worker_of_a_row_alone_has_texts(P_world: Partition, tmp_path: Path) -> None:
    made: list[int] = []
    example = trainers.module("tensor_parallel")

    class Counted(trainers.module("texts").Documentation):
        def batch(self, step: int, row: int) -> object:
            made.append(row)
            return super().batch(step, row)

    file = tmp_path / "results.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "Documentation", Counted)
        assert run(P_world, *SMALL, "--steps", 12, "--lr", 0.01, "--json", file) == 0
    assert made == {0: [0] * 12, 2: [1] * 12}.get(P_world.rank or 0, [])
    if P_world.rank == 0:
        record = json.loads(file.read_text())
        assert "sequential_loss" not in record
        assert record["loss"][-1] < 0.9 * record["loss"][0]


def test_runs_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    done = trainers.start(
        "tensor_parallel", *SMALL, "--steps", 2, "--seed", 1, "--compare", "--json", file
    )
    assert done.returncode == 0, done.stderr
    assert_sequential(file, [2, 2], 2)
    assert "2 x 2 workers against one, after 2 steps" in done.stdout


@distributed(ranks=1, transports=("host",))
def test_a_difference_is_a_failure(P_world: Partition) -> None:
    alone = ("--data-parallel", 1, "--tensor-parallel", 1)
    with redirect_stderr(io.StringIO()) as errors:
        assert run(P_world, *SMALL, *alone, "--steps", 1, "--compare", "--tolerance", -1) == 1
    assert "the networks differ: a loss differs by" in errors.getvalue()
    assert "the networks differ: the parameters differ by" in errors.getvalue()


def test_wrong_number_of_workers() -> None:
    done = trainers.start("tensor_parallel", ranks=None)
    assert done.returncode == 2
    assert "rank 0 of 1: 2 rows of 2 are 4 workers" in done.stderr
    assert "--nproc-per-node 4 examples/tensor_parallel.py" in done.stderr


def test_texts() -> None:
    texts = trainers.module("texts")
    documentation = texts.Documentation(8, 50, 512, 0)
    batch = documentation.batch(3, 1)
    assert batch.tokens.shape == batch.targets.shape and len(batch.tokens) == 8
    ends = (batch.targets != texts.IGNORED).sum(1)
    assert 50 <= int(ends.min()) < int(ends.max()) == batch.tokens.shape[1] <= 512
    for tokens, targets, end in zip(batch.tokens, batch.targets, ends.tolist(), strict=True):
        assert torch.equal(tokens[1:end], targets[: end - 1])
        assert (targets[end:] == texts.IGNORED).all()
    assert int(batch.tokens.min()) >= 0 and int(batch.tokens.max()) < texts.VOCABULARY
    # Each step and row has its own samples, the same for everyone.
    assert torch.equal(documentation.batch(3, 1).tokens, batch.tokens)
    for step, row in ((3, 0), (4, 1)):
        assert documentation.batch(step, row).tokens.shape != batch.tokens.shape
