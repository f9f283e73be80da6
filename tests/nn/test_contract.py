"""Every layer of ``LAYERS`` keeps the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from gpudist.nn.layer_table import LAYERS, Layer
from tests.every import EVERY
from tests.nn import contract
from tests.nn.contract import Grid, Pair, check_on, grids, on_grid

pytestmark = pytest.mark.filterwarnings("ignore")
by_layer = pytest.mark.parametrize("row", LAYERS, ids=lambda row: row.name)
# Asked on the last grid that a layer takes, which cuts several dims if it can.
QUESTIONS: dict[str, Callable[[Pair], None]] = {
    "adjoint": contract.adjoint,
    "penalty on gradients": contract.penalty_on_gradients,
    "agreed at every call": partial(contract.agreed, shape="dynamic"),
    "agreed before": contract.agreed_before,
    "frozen": contract.frozen,
    "float32": partial(contract.dtype, of=torch.float32),
    "bfloat16": partial(contract.dtype, of=torch.bfloat16),
    "autocast": contract.autocast,
    "autocast of 16 bits": partial(contract.autocast, of=torch.bfloat16),
    "cast after autocast": contract.cast_after_autocast,
    "checkpoint": partial(contract.checkpointed, use_reentrant=False),
    "reentrant checkpoint": partial(contract.checkpointed, use_reentrant=True),
    "state": contract.state,
    "text": contract.text,
}


@by_layer
def test_same_as_sequential_on_every_grid(row: Layer) -> None:
    every = list(grids(row))
    check_on(row, every, contract.same_as_sequential, len(every))


@by_layer
def test_rule_of_global_tensors(row: Layer) -> None:
    """On the last two grids that the layer takes: ``tests/sbp`` asks functions on all layouts."""
    every = list(grids(row))[::-1]
    check_on(row, every, contract.rule, len(every) if EVERY else 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("question", QUESTIONS)
@by_layer
def test_question(row: Layer, question: str) -> None:
    check_on(row, list(grids(row))[::-1], QUESTIONS[question], 1)


def alone(row: Layer) -> list[Grid]:
    return [(1,) * len(row.inputs[0].shape)]


@pytest.mark.one_in(4)
@by_layer
def test_compiles_whole(row: Layer) -> None:
    check_on(row, alone(row), contract.compiled, 1)


@by_layer
def test_forward_mode(row: Layer) -> None:
    check_on(row, alone(row), contract.forward_mode, 1)


@by_layer
def test_a_rank_that_fails_ends_the_wait_of_the_others(row: Layer) -> None:
    taken = next(each for each in grids(row) if on_grid(row, each, lambda pair: None) is None)
    with pytest.raises(contract.FailsFirst):
        on_grid(row, taken, contract.failure)
