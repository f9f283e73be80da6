"""The fuzzer finds nothing here, finds what is broken on purpose, and shrinks it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest

from gpudist import nn
from gpudist.errors import ShapeError
from gpudist.nn.affine import conv
from gpudist.ops.halo_exchange import HaloExchange
from tests.every import EVERY
from tests.fuzz import __main__ as command
from tests.fuzz.case import Case, from_json, to_json
from tests.fuzz.families import families
from tests.fuzz.refusals import is_right
from tests.fuzz.run import Configuration, Runner, draw
from tests.pool import the_pool

# Torch warns once of what some configurations cost it, on one rank.
pytestmark = pytest.mark.filterwarnings("ignore")
SEED = 20
RANKS = range(2, 7)
by_family = pytest.mark.parametrize(
    "family", families(), ids=lambda family: family.__name__.split(".")[-1]
)
CONV = Case("Conv1d", (1, 1, 3), (1, 1, 6), {"out_channels": 1, "kernel_size": 3, "padding": 1})


@pytest.fixture
def runner() -> Runner:
    return Runner(the_pool)


def varied(family: Any, count: int) -> Iterator[Configuration]:
    """Yield configurations, each with the most pairs of options that none before it has."""
    rng = random.Random(SEED)
    layers = itertools.islice(itertools.cycle(family.LAYERS), count)
    drawn = [draw(rng, number, [layer], RANKS) for number, layer in enumerate(layers)]
    seen: set[Any] = set()
    while drawn:
        best = max(drawn, key=lambda each: len(pairs(each.case) - seen))
        seen |= pairs(best.case)
        drawn.remove(best)
        yield best


def pairs(case: Case) -> set[Any]:
    """Return the pairs of a configuration's options, which dims are split among them."""
    split = "".join("s" if n > 1 else "-" for n in case.grid)
    facts = {**case.options, "grid": split, "uneven": bool(case.sizes), "dtype": case.dtype}
    told = [
        (name, value if isinstance(value, (bool, str, float)) else type(value).__name__)
        for name, value in facts.items()
    ]
    return {(case.layer, *pair) for pair in itertools.combinations_with_replacement(told, 2)}


@by_family
def test_random_configurations(runner: Runner, family: Any) -> None:
    count = (30 if EVERY else 6) * max(len(family.LAYERS), 6)
    judged = ((drawn, runner.judge(drawn)) for drawn in varied(family, 5 * count))
    accepted = (pair for pair in judged if pair[1].how != "refused by torch")
    verdicts = list(itertools.islice(accepted, count))
    wrong = [(drawn, verdict) for drawn, verdict in verdicts if verdict.how == "wrong"]
    assert not wrong, "\n".join(f"{drawn.to_json()}\n{verdict.text}" for drawn, verdict in wrong)
    transports = {drawn.transport for drawn, _ in verdicts}
    assert transports == ({"loopback", "host", "gloo"} if EVERY else {"loopback", "host"})
    right = [drawn for drawn, verdict in verdicts if verdict.how == "right"]
    assert 2 * len(right) >= count


@by_family
def test_every_layer_of_a_family_is_one_and_is_drawn(family: Any) -> None:
    for layer in family.LAYERS:
        assert hasattr(nn, layer) or hasattr(nn, f"Distributed{layer}")
        for ranks in (2, 6):
            case = family.draw(random.Random(ranks), layer, ranks)
            assert case.layer == layer and prod(case.grid) <= ranks
            assert from_json(to_json(case)) == (case, {})


@pytest.fixture
def wrong_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halos that wrap round the edge of the tensor, where there should be zeros."""

    class Periodic(HaloExchange):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "periodic": True})

    monkeypatch.setattr(conv, "HaloExchange", Periodic)


@pytest.mark.usefixtures("wrong_edges")
def test_a_broken_halo_is_found_and_made_small(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = (runner.examine(n, SEED, ["Conv2d"], RANKS) for n in range(40) if n % 10 != 9)
    drawn, verdict = next((drawn, verdict) for drawn, verdict in verdicts if verdict.how == "wrong")
    small = command.shrunk(runner, drawn, verdict)
    assert "output" in verdict.text
    assert runner.judge(Configuration.from_json(small.to_json())).kind == verdict.kind
    assert set(small.case.options) <= {"out_channels", "kernel_size", "padding"}
    assert small.case.sizes == {} and small.case.dtype == "float64"
    assert prod(small.case.shape) <= 4 < prod(drawn.case.shape)
    monkeypatch.undo()
    assert runner.judge(small).how == "right"


def fail_on_rank_1(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Callable[[], Exception]
) -> None:
    original = getattr(nn.DistributedConv1d, method)

    def fails(self: Any, P_x: Any, *arguments: Any, **options: Any) -> Any:
        partition = P_x if method == "__init__" else self.P_x
        if partition.world.rank == 1:
            raise error()
        return original(self, P_x, *arguments, **options)

    monkeypatch.setattr(nn.DistributedConv1d, method, fails)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_a_refusal_on_one_rank_is_wrong(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fail_on_rank_1(monkeypatch, method, lambda: ShapeError("not here"))
    verdict = runner.judge(Configuration(CONV, 3))
    assert verdict.how == "wrong"
    assert verdict.text.startswith("refused on ranks [1] of 3 only"), verdict.text


@pytest.mark.parametrize("error", [TypeError, RuntimeError, ZeroDivisionError, KeyError])
def test_another_error_is_wrong(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    fail_on_rank_1(monkeypatch, "forward", lambda: error("oh"))
    verdict = runner.judge(Configuration(CONV, 3))
    assert verdict.how == "wrong" and verdict.text.startswith(error.__name__), verdict


LINEAR = "ShapeError: DistributedLinear, dim -1: "
WINDOW = "ShapeError: DistributedMaxPool2d, dim 3: a window of kernel 2 "
CONV2D = "PartitionError: DistributedConv2d, dim 1: "


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            f"{LINEAR}2 blocks but only 1 input features; use at most 1 workers along that axis",
            True,
        ),
        (
            f"{LINEAR}2 blocks but only 2 input features; use at most 2 workers along that axis",
            False,
        ),
        (f"{WINDOW}and dilation 3 over 2 cells holds padding only; pad less", True),
        (f"{WINDOW}and dilation 2 over 2 cells holds padding only; pad less", False),
        (f"{LINEAR}the input is not to its liking", False),
        ("KeyError: DistributedEmbedding: sparse is not supported; omit it", False),
        (
            f"{CONV2D}groups 4 with split channels need a block-diagonal partition: as many blocks "
            "of input as of output channels, a divisor of groups, and P_w of shape [2, 1, 1, 1]; "
            "got 2 and 2 blocks and P_w [2, 2, 1, 1]",
            True,
        ),
        (
            f"{CONV2D}groups 4 with split channels need a block-diagonal partition: as many blocks "
            "of input as of output channels, a divisor of groups, and P_w of shape [2, 1, 1, 1]; "
            "got 2 and 2 blocks and P_w [2, 1, 1, 1]",
            False,
        ),
    ],
)
def test_a_refusal_must_be_known_and_true(text: str, expected: bool) -> None:
    assert is_right(text) is expected


def test_a_refusal_without_a_known_reason_is_wrong(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, x: Any) -> Any:
        raise ShapeError("not today")

    monkeypatch.setattr(nn.DistributedConv1d, "forward", forward)
    verdict = runner.judge(Configuration(CONV, 3))
    assert verdict.how == "wrong"
    assert "not today" in verdict.text
