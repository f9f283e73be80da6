"""Parts of global tensors: attributes, values and gradients."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.sbp import Placement, explain
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, assert_matches, global_of
from tests.sbp.parts import B, P, S, random

# Result of a split of each dim of [5, 4, 2] on two ranks; None means boxed.
OPERATORS: dict[str, tuple[Any, list[Any]]] = {
    "rows": (lambda x: x[1:3], [S(0, [2, 0]), S(1), S(2)]),
    "every other": (lambda x: x[1::2, :3], [S(0), S(1, [2, 1]), S(2)]),
    "last rows": (lambda x: x[-2:, 2:], [S(0, [0, 2]), S(1, [0, 2]), S(2)]),
    "no rows": (lambda x: x[3:3], [S(0), S(1), S(2)]),
    "of a slice": (lambda x: x[1:][:, 1:4][:3], [S(0, [2, 1]), S(1, [1, 2]), S(2)]),
    "all": (lambda x: x[:, 0:9, None], [S(0), S(1), S(3)]),
    "int": (lambda x: x[-2], [P, S(0), S(1)]),
    "ints": (lambda x: x[..., 3, 1], [S(0), P, P]),
    "mixed": (lambda x: x[4, None, ::2], [P, S(1), S(2)]),
    "select": (lambda x: x.select(1, 2), [S(0), P, S(1)]),
    "narrow": (lambda x: x.narrow(-2, 1, 2), [S(0), S(1), S(2)]),
    "narrow from the end": (lambda x: x.narrow(0, -2, 2), [S(0, [0, 2]), S(1), S(2)]),
    "flip": (lambda x: x.flip(0, -1), [S(0), S(1), S(2)]),
    "roll": (lambda x: x.roll((1, 2), (0, 1)), [S(0), S(1), S(2)]),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 0)), [S(0), S(1), S(2, [2, 3])]),
    "pad circular": (lambda x: F.pad(x, (1, 1), mode="circular"), [S(0), S(1), S(2)]),
}


@distributed(ranks=2, transports=("loopback",))
def test_one_axis(P_world: Partition) -> None:
    placement, x = Placement("cpu", range(2), P_world), random((5, 4, 2))
    for name, (function, expected) in OPERATORS.items():
        rows = [*zip((S(0), S(1), S(2)), expected, strict=True), (B, B), (P, P)]
        for given, result in rows:
            with explain() as lines:
                (y,) = assert_matches(function, [x], placement, [(given,)], double=True)
            assert any("boxed to" in line for line in lines) == (result is None), (name, lines)
            assert result is None or y.sbp == (result,), name


@distributed(ranks=8, transports=("loopback",))
def test_two_and_three_axes(P_world: Partition) -> None:
    """Some blocks have the int's cells and some have none; on uneven axes, and on three."""
    x = random((5, 4, 2))
    placement = Placement("cpu", [[0, 1, 2], [3, 4, 5]], P_world)
    for sbp in ((S(0), S(0)), (S(0), S(1)), (S(1), P), (S(2), S(0))):
        assert_matches(lambda t: t[3, ..., 1], [x], placement, [sbp])
        assert_matches(lambda t: t[1:, 2], [x], placement, [sbp])
        assert_matches(lambda t: t[2:, :3], [x], placement, [sbp])
    placement = Placement("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], P_world)
    (y,) = assert_matches(lambda t: t[2, :, 0], [x], placement, [(S(0), S(2), S(1))])
    assert y.sbp == (P, P, S(0))


@distributed(ranks=2, transports=("loopback",))
def test_views_share_memory_or_refuse(P_world: Partition) -> None:
    """A change of a view changes the tensor, or is refused."""
    placement = Placement("cpu", [0, 1], P_world)
    x = random((4, 3))
    y = global_of(x, placement, (S(1),))
    y[1:3].zero_()
    y.t()[:, 0].fill_(1.0)
    y.flatten(1).unbind(0)[3].mul_(2)
    x[1:3], x[0] = 0, 1
    x[3] *= 2
    assert_global(y, x)
    z = global_of(x, placement, (S(0),))
    z[1:3].zero_()
    z[2:].t()[0].fill_(3.0)
    z.narrow(0, 3, 1).unsqueeze(0)[:, :, 1:].mul_(2)
    z.flatten().narrow(0, 0, 2).add_(1)
    x[1:3], x[2:, 0] = 0, 3
    x[0, :2] += 1
    x[3, 1:] *= 2
    assert_global(z, x)
    # Those that had to be boxed, too.
    views: list[Callable[[Any], Any]] = [
        lambda t: t[0],
        lambda t: t[1:][0],
        lambda t: t.view(3, 4),
        lambda t: t.view(3, 4)[2:],
        lambda t: t.split(3)[0],
    ]
    for i, view in enumerate(views):
        view(z).add_(i)
        view(x).add_(i)
        assert_global(z, x)
    # A view of a copy follows the copy, which follows the tensor.
    slices = [t.view(3, 4)[1:] for t in (z, x)]
    z.mul_(3)
    x.mul_(3)
    assert_global(slices[0], slices[1])


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "slice": lambda x, v: x.__setitem__((slice(None), slice(1, 4)), v[:3]),
    "int": lambda x, v: x.__setitem__((slice(None), -2), v[:2]),
    "ints": lambda x, v: x.__setitem__((0, 3), v[2]),
    "none": lambda x, v: x.__setitem__((0, None, slice(1, 4)), v[None, :3]),
    "more dims": lambda x, v: x.__setitem__((1, slice(0, 3)), v[None, None, :3]),
    "steps": lambda x, v: x.__setitem__((..., slice(None, None, 2)), v[0, :2]),
    "number": lambda x, v: x.__setitem__((1, ..., 0), 3.0),
    "all": lambda x, v: x.__setitem__(slice(None), v[3]),
    "mask": lambda x, v: x.__setitem__(x > 0.5, -1.0),
    "mask of rows": lambda x, v: x.__setitem__((x.detach() > 0.5)[:, :, 0], 2.0),
}


@pytest.mark.parametrize("name", WRITES)
@distributed(ranks=2, transports=("loopback",))
def test_written(P_world: Partition, name: str) -> None:
    """``x[...] = v``: values, and gradients of both."""
    placement = Placement("cpu", [0, 1], P_world)

    def written(x: Any, v: Any) -> Any:
        y = x * 2
        WRITES[name](y, v)
        return y * y + v.sum()

    xs = [random((2, 5, 4)), random((4, 4))]
    for sbp in (S(0), S(1), S(2), B, P):
        for of_value in (B, S(1), P):
            assert_matches(written, xs, placement, [(sbp,), (of_value,)])


@distributed(ranks=2, transports=("loopback",))
def test_refusals(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    x = global_of(random((4, 3)), placement, (S(0),))
    for wrong in ([0, 1], x > 0, torch.tensor(1), True):
        with pytest.raises(NotImplementedError, match=r"takes ints, slices, None and \.\.\."):
            x[wrong]
    with pytest.raises(IndexError):
        x[4]
    y = F.pad(global_of(random((4, 3)), placement, (P,)), (1, 1), value=2.0)
    assert y.sbp != (P,)
