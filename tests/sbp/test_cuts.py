"""Explicit uneven cuts: what fits, what moves, and every operator on random ones, some empty."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import pickle
import random as python_random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.partition import Partition
from gpudist.sbp import Placement, Sbp, explain, to_global
from gpudist.sbp.registry import Rule, forms, mapped, name_of, signatures, tensors_in
from tests.pool import distributed
from tests.sbp.compare import assert_global, assert_matches, global_of
from tests.sbp.parts import B, P, S, part_of, random
from tests.sbp.tables import attributes, cut_at, sizes_of

X, Y = random((5, 3)).sigmoid(), random((5, 3), 1).sigmoid()
IMAGE, PLACES = random((2, 6, 4)).sigmoid(), torch.tensor([[2, 0, 1]] * 5)
W = random((4, 3), 2).sigmoid()
OUTPUT, SQUARES = random((5, 4)), random((2, 6, 6), 3)
MASK, CLASSES = Y > 0.5, torch.tensor([2, 0, -100, 1, 1])
# Arguments; each function is called with all that torch takes.
ARGUMENTS: list[tuple[Any, ...]] = [
    (X,), (X, Y), (MASK,), (MASK, MASK), (X, Y, Y + 1), (X, 0.5), (X, MASK, 0.5), (MASK, X, Y),
    (X, 1), (X, -1, 2), (X, 2, 1), (X, (2, 0, 1), -1), (X, slice(1, 4)), (X, (1, 0)), (X, 0, 1),
    (X, (1, 2)), (X, (5, 3, 1)), (X, (2, 5, 3)), (X, (2, 1)), (X, torch.float32), ([X, Y], 1),
    (X, W.t()), (X, W), (X, W, W[:, 0]), (W[:, 0], X, W.t()), (X, W[0]), (X[:, 0], Y[:, 0]),
    (IMAGE.expand(2, 6, 4), IMAGE.transpose(1, 2)), (SQUARES, IMAGE, IMAGE.transpose(1, 2)),
    (IMAGE,), (IMAGE, IMAGE[0, :, 0]), (IMAGE, 3), (IMAGE, (4,), IMAGE[0, 0]), (OUTPUT, X, W.t()),
    (IMAGE, IMAGE[0, :, 0], None, None, None, True, 0.0, 1e-5, False),
    (PLACES, W[:3]), (X, 0, PLACES[0]), (X, 0, PLACES), (X, 0, PLACES, Y), (PLACES, 4),
    (X, CLASSES), ("ij,kj->ik", X, W), (X, Y, None, None, "sum"),
]  # fmt: skip
REFUSALS = (
    TypeError, RuntimeError, LookupError, ValueError, AttributeError, ArithmeticError, UserWarning,
)  # fmt: skip
EVERY = [function for function, entry in signatures.items() if getattr(entry, "any_cuts", False)]
# Whose values are whatever was in memory; which drops other cells than torch does.
for function in (torch.empty_like, *forms("dropout")):
    EVERY.remove(function)


def is_tensor(one: Any) -> bool:
    return isinstance(one, torch.Tensor)


Case = tuple[Callable[..., Any], list[torch.Tensor], bool]


def cases(function: Any) -> Iterator[Case]:
    """The function of tensors alone, these, and whether it has gradients: all that torch takes."""
    entry = signatures[function]
    assert isinstance(entry, Rule)
    for arguments in ARGUMENTS:
        tensors = list(tensors_in(arguments))

        def call(*xs: torch.Tensor, given: Any = arguments) -> Any:
            left = iter(xs)
            args = mapped(given, lambda one: next(left) if is_tensor(one) else one)
            if entry.in_place:
                args = (args[0].clone(), *args[1:])
            return function(*args)

        given = [x.clone() for x in tensors]
        try:
            with torch.no_grad():
                results = list(tensors_in(call(*given)))
        except REFUSALS:
            continue
        is_finite = all(bool(y.isfinite().all()) for y in results)
        if given and results and is_finite and not any(x._version for x in given):
            yield call, tensors, differentiates(call, tensors)


def differentiates(function: Callable[..., Any], xs: list[torch.Tensor]) -> bool:
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in xs]
    try:
        ends = [y for y in tensors_in(function(*given)) if y.requires_grad]
        if ends:
            starts = [x for x in given if x.requires_grad]
            torch.autograd.grad(ends, starts, list(map(torch.ones_like, ends)))
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.fixture(scope="module")
def table() -> dict[Any, list[Case]]:
    """The cases of every function. Some warn once in a process, so that ranks cannot ask torch."""
    return {function: list(cases(function)) for function in EVERY}


def plain(one: Sbp) -> Sbp:
    return S(one.dim) if one.is_split else one


def assert_as_balanced(case: Case, placement: Placement, cut: list[Sbp]) -> bool:
    """Values and gradients on these cuts; nothing is boxed or refused that is not so in balanced
    blocks too.

    Returns:
        Whether it is carried out.
    """
    function, xs, has_gradients = case
    what = f"{[list(x.shape) for x in xs]} by {cut}"
    parts = [global_of(x, placement, (plain(one),)) for x, one in zip(xs, cut, strict=True)]
    try:
        with explain() as balanced, torch.no_grad():
            expected: list[Any] = list(tensors_in(function(*parts)))
    except REFUSALS as error:
        parts = [global_of(x, placement, (one,)) for x, one in zip(xs, cut, strict=True)]
        with pytest.raises(type(error)), torch.no_grad():
            function(*parts)
        return False
    with explain() as lines:
        given = function if has_gradients else lambda *xs: function(*(x.detach() for x in xs))
        outputs = assert_matches(given, xs, placement, [(one,) for one in cut])
    # Group norm has whole groups in balanced blocks alone.
    if not any("boxed to" in line or "group_norm" in line for line in balanced):
        assert not any("boxed to" in line for line in lines), (what, lines)
        for y, x in zip(outputs, expected, strict=True):
            assert tuple(map(plain, y.sbp)) == tuple(map(plain, x.sbp)), (what, lines)
    return True


@pytest.mark.parametrize("part", range(2))
@distributed(ranks=2, transports=("loopback",), timeout_s=300)
def test_every_operator_on_two(P_world: Partition, part: int, table: dict[Any, list[Case]]) -> None:
    assert_every(Placement("cpu", [0, 1], P_world), {f: table[f] for f in EVERY[part::2]})


@pytest.mark.parametrize("part", range(2))
@distributed(ranks=3, transports=("loopback",), timeout_s=300)
def test_every_operator_on_three(
    P_world: Partition, part: int, table: dict[Any, list[Case]]
) -> None:
    assert_every(Placement("cpu", [1, 0, 2], P_world), {f: table[f] for f in EVERY[part::2]})


def assert_every(placement: Placement, table: dict[Any, list[Case]]) -> None:
    """Each function carries out one of its cases, on drawn cuts of its tensors."""
    failed: list[str] = []
    parts = placement.partition.size
    for function, found in table.items():
        chosen = python_random.Random(f"{name_of(function)} {parts}")
        for _ in range(20):
            case = chosen.choice(found)
            xs = case[1]
            sizes = {n: sizes_of(n, parts, chosen) for x in xs for n in x.shape}
            ones = [chosen.choice(attributes(x))[0] for x in xs]
            if chosen.random() < 0.5:
                # One cut of all tensors of a shape.
                kind = ones[0] if ones[0] != P else B
                same = [x.shape == xs[0].shape for x in xs]
                ones = [kind if s else one for s, one in zip(same, ones, strict=True)]
            cut = [cut_at(one, sizes, x.shape) for one, x in zip(ones, xs, strict=True)]
            try:
                if assert_as_balanced(case, placement, cut):
                    break
            except (AssertionError, RuntimeError) as error:
                failed.append(f"{name_of(function)}, {cut}: {error}")
                break
        else:
            failed.append(f"{name_of(function)}: no case is carried out")
    assert not failed, "\n".join(failed)
