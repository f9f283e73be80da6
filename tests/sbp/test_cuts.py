"""Explicit uneven cuts: what fits, what moves, and every operator on random ones, some empty."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import functools
import pickle
import random as python_random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gpudist
from gpudist.errors import PartitionError, ShapeError
from gpudist.sbp import Placement, Sbp, explain, to_global
from gpudist.sbp.registry import Rule, name_of, signatures
from gpudist.sbp.signatures.attention_with_dropout import dropping_attention
from gpudist.sbp.signatures.channel_norms import updating_batch_norm
from gpudist.sbp.signatures.dropout import drop_cells
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, assert_matches, global_of
from tests.sbp.parts import B, P, S, part_of, random
from tests.sbp.tables import attributes, cut_at, sizes_of

X, Y = random((5, 3)).sigmoid(), random((5, 3), 1).sigmoid()
IMAGE, PLACES = random((2, 6, 4)).sigmoid(), torch.tensor([[2, 0, 1]] * 5)
W = random((4, 3), 2).sigmoid()
PLACED = torch.tensor([0, 2, 4])
VOLUME = random((1, 2, 4, 3, 4), 4).sigmoid()
OUTPUT, SQUARES = random((5, 4)), random((2, 6, 6), 3)
MASK, CLASSES = Y > 0.5, torch.tensor([2, 0, -100, 1, 1])
MATRICES = SQUARES[:, :3, :3] @ SQUARES[:, :3, :3].mT + torch.eye(3, dtype=torch.float64)
COMPLEX, INTEGERS = torch.complex(X, Y), torch.tensor([[4, 6, 9]] * 5)
FILTER = random((2, 6, 2), 6)
# Arguments; each function is called with all that torch takes.
ARGUMENTS: list[tuple[Any, ...]] = [
    (X,), (X, Y), (MASK,), (MASK, MASK), (X, Y, Y + 1), (X, 0.5), (X, MASK, 0.5), (MASK, X, Y),
    (X, 1), (X, -1, 2), (X, 2, 1), (X, (2, 0, 1), -1), (X, slice(1, 4)), (X, (1, 0)), (X, 0, 1),
    (X, (1, 2)), (X, (5, 3, 1)), (X, (2, 5, 3)), (X, (2, 1)), (X, torch.float32), ([X, Y], 1),
    (X, W.t()), (X, W), (X, W, W[:, 0]), (W[:, 0], X, W.t()), (X, W[0]), (X[:, 0], Y[:, 0]),
    (IMAGE.expand(2, 6, 4), IMAGE.transpose(1, 2)), (SQUARES, IMAGE, IMAGE.transpose(1, 2)),
    (X[:, 0], X, W[0]), (OUTPUT, X[:, 0], W[:, 0]), (IMAGE[0], SQUARES, IMAGE),
    (IMAGE,), (IMAGE, IMAGE[0, :, 0]), (IMAGE, 3), (IMAGE, (4,), IMAGE[0, 0]), (OUTPUT, X, W.t()),
    (IMAGE, IMAGE[0, :, 0], None, None, None, True, 0.0, 1e-5),
    (PLACES, W[:3]), (X, 0, PLACES[0]), (X, 0, PLACES), (X, 0, PLACES, Y), (PLACES, 4),
    (X, CLASSES), ("ij,kj->ik", X, W), (X, Y, None, None, "sum"),
    (IMAGE, 2), (VOLUME, 2), (IMAGE, 2, 2), (VOLUME, 2, 2), (IMAGE, random((6, 6, 2))),
    (VOLUME[..., 1], random((2, 2, 2, 2))), (VOLUME, random((2, 2, 2, 2, 2))),
    (X + 1,), (2, X), (X + 1, Y), (COMPLEX,), (X[:, :2],), (INTEGERS, INTEGERS),
    (X, CLASSES.clamp(0)), (MATRICES,), (MATRICES, 2), (MATRICES, IMAGE[:, :3]), (X, PLACES),
    (IMAGE, IMAGE[0, :, 0], None, 1e-5, torch.float64), (IMAGE, FILTER),
    (IMAGE[:, :, None], FILTER[:, :, None]), (IMAGE[None, None], FILTER[:, :1, None, None]),
    (IMAGE, IMAGE, IMAGE, None, True, None, False),
    (IMAGE, 1, 2, 2), (SQUARES[:, :4], (4, 6), 2, 1, 0, 2), (IMAGE[:, :2, :3], [2, 2, 3, 4], False),
    (IMAGE[..., :3], PLACED.expand(2, 6, 3), 2), (VOLUME[0, ..., :3], PLACED.expand(2, 4, 3, 3), 2),
    (VOLUME[..., :3], PLACED.expand(1, 2, 4, 3, 3), 2),
    (VOLUME[0], random((2, 3, 3, 2)), "bilinear", "zeros", False), (VOLUME[..., 1], 2, 1, 0, 2),
]  # fmt: skip
REFUSALS = (
    TypeError, RuntimeError, LookupError, ValueError, AttributeError, ArithmeticError, UserWarning,
)  # fmt: skip
EVERY = [function for function, entry in signatures.items() if getattr(entry, "any_cuts", False)]
# Functions with uninitialized values, with other dropped cells than torch's, with keyword
# arguments, and one that changes the running moments it is given.
OTHERS = (
    torch.empty_like, drop_cells, dropping_attention, torch.stft, torch.Tensor.stft,
    torch.linalg.solve_triangular, updating_batch_norm,
)  # fmt: skip
for function in OTHERS:
    EVERY.remove(function)


def is_tensor(one: Any) -> bool:
    return isinstance(one, torch.Tensor)


Case = tuple[Callable[..., Any], list[torch.Tensor], bool]


def cases(function: Any) -> Iterator[Case]:
    """The function of tensors alone, these, and whether it has gradients: all that torch takes."""
    entry = signatures[function]
    assert isinstance(entry, Rule)
    for arguments in ARGUMENTS:
        tensors = tensors_in(arguments)

        def call(*xs: torch.Tensor, given: Any = arguments) -> Any:
            left = iter(xs)
            args = map_tree(given, lambda one: next(left) if is_tensor(one) else one)
            if entry.in_place:
                args = (args[0].clone(), *args[1:])
            return function(*args)

        given = [x.clone() for x in tensors]
        try:
            with torch.no_grad():
                results = tensors_in(call(*given))
        except (*REFUSALS, AssertionError):
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


@functools.cache
def table_of(part: int) -> dict[Any, list[Case]]:
    return {function: list(cases(function)) for function in EVERY[part::2]}


@pytest.fixture
def table(part: int) -> dict[Any, list[Case]]:
    """The cases of half the functions. Some warn once in a process, so ranks cannot ask torch."""
    return table_of(part)


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
            expected: list[Any] = tensors_in(function(*parts))
    except REFUSALS as error:
        parts = [global_of(x, placement, (one,)) for x, one in zip(xs, cut, strict=True)]
        with pytest.raises(type(error)), torch.no_grad():
            function(*parts)
        return False
    with explain() as lines:
        given = function if has_gradients else lambda *xs: function(*(x.detach() for x in xs))
        outputs = assert_matches(given, xs, placement, [(one,) for one in cut])
    # Group norm has whole groups in balanced blocks alone; a reshape cuts both shapes somewhere;
    # the dim of an index is not sought in blocks without cells.
    others = ("boxed to", "group_norm", "reshape", "__getitem__")
    if not any(words in line for line in balanced for words in others):
        assert not any("boxed to" in line for line in lines), (what, lines)
        for y, x in zip(outputs, expected, strict=True):
            assert tuple(map(plain, y.sbp)) == tuple(map(plain, x.sbp)), (what, lines)
    return True


def test_attributes() -> None:
    """Equal cuts are equal attributes; wrong ones are refused."""
    assert S(0, [3, 2]) == S(0) == Sbp("split", 0, (1, 1)) and S(0, [2, 3]) != S(0)
    assert S(0, [2, 3]) == S(0, (2, 3)) and hash(S(0, [2, 3])) == hash(S(0, (2, 3)))
    assert S(0, [2, 3]).dual == S(0, [2, 3]) and S(0, [2, 3]) != S(1, [2, 3])
    assert repr(S(1, [0, 4])) == "split(1, sizes=[0, 4])"
    assert pickle.loads(pickle.dumps(S(1, [0, 4]))) == copy.deepcopy(S(1, [0, 4])) == S(1, [0, 4])
    for wrong in ([], [-1, 3]):
        with pytest.raises(PartitionError, match="each 0 or more"):
            S(0, wrong)
    with pytest.raises(PartitionError, match="only a split takes sizes"):
        Sbp("broadcast", sizes=(1, 2))
    given: list[Any] = [3, [1.5], "12"]
    for wrong in given:
        with pytest.raises(ShapeError, match=r"sizes is .* it takes a sequence of integers"):
            S(0, wrong)


@distributed(ranks=4, transports=("loopback",))
def test_sizes_that_do_not_fit(P_world: Partition) -> None:
    """All ranks see the same error, before anything moves."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x = random((5, 4))
    y = global_of(x, placement, (B, B))
    before = P_world.wire.recorder.count
    for wrong in (
        (S(0, [1, 2]), B),
        (B, S(0, [1, 2, 2])),
        (S(1), S(1, [0, 4])),
        (S(0), S(0, [0, 3])),
    ):
        with pytest.raises(ShapeError, match="give one size per worker"):
            y.to_global(sbp=wrong)
        with pytest.raises(ShapeError, match="give one size per worker"):
            y.to_local(grad_sbp=wrong)
    with pytest.raises(ShapeError, match=r"has 2 workers and splits 2 or 3 cells of dim 0"):
        y.to_global(sbp=(S(0), S(0, [0, 3])))
    assert P_world.wire.recorder.count == before
    # Blocks of blocks, where the outer ones are equal.
    assert_global(y.to_global(sbp=(S(1), S(1, [0, 2]))), x)
    assert_global(y.to_global(sbp=(S(0, [1, 4]), S(0))), x)
    rank = P_world.rank or 0
    with pytest.raises(ShapeError, match=r"rank 0 has shape \[2\].*must be \[3\].*sizes=\[...\]"):
        to_global(torch.ones(2 + (rank == 2)), Placement("cpu", [0, 1, 2], P_world), S(0))
    with pytest.raises(ShapeError, match="3 sizes add up to 6 cells, but axis 0 has 2 workers"):
        to_global(torch.ones(3), Placement("cpu", [0, 1], P_world), S(0, [1, 2, 3]))
    with pytest.raises(ShapeError, match=r"2 sizes add up to 5 cells.* splits 4 cells of dim 0"):
        to_global(torch.ones(2), Placement("cpu", [0, 1], P_world), S(0, [1, 4]))


@distributed(ranks=3, transports=("loopback", "host"))
def test_local_to_global_and_back(P_world: Partition) -> None:
    """Empty blocks too; gradients, copies and texts have the same cut."""
    placement = Placement("cpu", [2, 0, 1], P_world)
    x, cut = random((5, 2)), S(0, [0, 4, 1])
    part = part_of(x, placement.layout((cut,), (5, 2)), P_world.rank or 0).requires_grad_()
    y = to_global(part, placement, cut)
    assert y.sbp == (cut,) and y.to_local().shape == part.shape
    assert_global(y, x)
    torch.testing.assert_close(y.full_tensor(), x)
    (y * y).sum().backward()
    torch.testing.assert_close(part.grad, 2 * part.detach())
    leaf = global_of(x, placement, (cut,), True)
    assert "split(0, sizes=[0, 4, 1])" in repr(leaf) and copy.deepcopy(leaf).sbp == (cut,)
    (leaf.to_global(sbp=S(0, [2, 0, 3])) * x[0, 0]).sum().backward()
    assert leaf.grad is not None and leaf.grad.sbp == (cut,)
    assert_global(leaf.grad, torch.full_like(x, float(x[0, 0])))
    assert_adjoint(
        lambda t: to_global(t, placement, cut).to_global(sbp=B).to_local(), part, P_world
    )
    assert_adjoint(
        lambda t: to_global(t, placement, cut).to_global(sbp=S(1)).to_local(), part, P_world
    )


@distributed(ranks=3, transports=("loopback",))
def test_optimizer(P_world: Partition) -> None:
    """States have the layouts of the parameters, and steps equal the sequential ones."""
    placement = Placement("cpu", [0, 1, 2], P_world)
    whole = torch.nn.Linear(5, 4).double()
    with torch.no_grad():
        whole.weight.copy_(random((4, 5)))
        whole.bias.copy_(random((4,)))
    made = copy.deepcopy(whole)
    cut = S(0, [1, 0, 3])
    made.weight = torch.nn.Parameter(global_of(whole.weight, placement, (cut,)))
    made.bias = torch.nn.Parameter(global_of(whole.bias, placement, (cut,)))
    x = random((3, 5), 5)
    for net, given in ((whole, x), (made, global_of(x, placement, (B,)))):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        with explain() as lines:
            for _ in range(3):
                optimizer.zero_grad()
                net(given).square().sum().backward()
                optimizer.step()
    assert lines and not any("boxed to" in line for line in lines)
    assert all(one["exp_avg"].sbp == (cut,) for one in optimizer.state.values())
    for a, b in zip(whole.parameters(), made.parameters(), strict=True):
        assert b.sbp == (cut,)
        assert_global(b, a)


@distributed(ranks=4, transports=("loopback",))
def test_layers_need_balanced_blocks(P_world: Partition) -> None:
    """Cuts with the same blocks will do, and what comes out may be too long for them."""
    P_x = P_world.create_cartesian_topology_partition([1, 1, 4, 1])
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x, pad = random((1, 2, 2, 3)), gpudist.nn.DistributedZeroPad2d(P_x, 1)
    assert_global(pad(global_of(x, placement, (S(2, [2, 0]), S(2)))), F.pad(x, (1, 1, 1, 1)))
    with pytest.raises(PartitionError, match="needs the blocks of P_x"):
        pad(global_of(x, placement, (S(2, [0, 2]), S(2))))


@distributed(ranks=2, transports=("loopback",))
def test_what_is_boxed(P_world: Partition) -> None:
    """Cells that move across blocks; an int's dim with an empty block, unlike one without."""
    placement = Placement("cpu", [0, 1], P_world)
    x = random((6, 2))
    for function, sizes, result in (
        (lambda t: t.flatten(), [1, 5], S(0, [2, 10])),
        (lambda t: t.view(3, 4), [1, 5], None),
        (lambda t: t.flip(0), [1, 5], S(0, [1, 5])),
        (lambda t: t[-1], [6, 0], None),
        (lambda t: t[-1], [1, 5], P),
        (lambda t: t[2:][:, None], [1, 5], S(0, [0, 4])),
        (lambda t: t.unsqueeze(0).transpose(1, 2), [1, 5], S(2, [1, 5])),
        (lambda t: t.repeat(1, 2), [0, 6], S(0, [0, 6])),
    ):
        with explain() as lines:
            (y,) = assert_matches(function, [x], placement, [(S(0, sizes),)], double=True)
        assert any("boxed to" in line for line in lines) == (result is None), lines
        assert result is None or y.sbp == (result,)
    a, b = (global_of(x, placement, (S(0, sizes),)) for sizes in ([1, 5], [6, 0]))
    with explain() as lines:
        assert_global(a * b, x * x)
    # To the cut of one of them, by the 5 rows that are elsewhere.
    assert "80 bytes boxed" in lines[0], lines


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", range(2))
@distributed(ranks=2, transports=("loopback",), timeout_s=300)
def test_every_operator_on_two(P_world: Partition, part: int, table: dict[Any, list[Case]]) -> None:
    assert_every(Placement("cpu", [0, 1], P_world), table)


# Begins with the half that the test above leaves out where one part runs.
@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", (1, 0))
@distributed(ranks=3, transports=("loopback",), timeout_s=300)
def test_every_operator_on_three(
    P_world: Partition, part: int, table: dict[Any, list[Case]]
) -> None:
    assert_every(Placement("cpu", [1, 0, 2], P_world), table)


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
