"""Entries of the table with arguments of their own for blocks, and with a run that communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.overrides import handle_torch_function, has_torch_function

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.layout import split
from gpudist.ops import all_sum_reduce
from gpudist.sbp import Placement, explain
from gpudist.sbp.call import Call, Slot, Spec, key_of
from gpudist.sbp.legal_signatures import calls_of_blocks, legal_signatures
from gpudist.sbp.registry import (
    AxisPart,
    Composite,
    Rule,
    SbpSignature,
    Where,
    forms,
    name_of,
    signatures,
)
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_matches, global_of
from tests.sbp.parts import B, P, S, random


def test_calls_of_an_axis_are_those_of_its_different_blocks() -> None:
    rule: Any = signatures[torch.neg]
    for extent, parts in product(range(10), range(1, 6)):
        call = Call(torch.neg, (Slot(0),), {}, (Spec((extent, 2), torch.float32),))
        options = legal_signatures(rule, (call,), parts)
        signature = next(option for option in options if option.inputs == (split(0),))
        blocks = Blocks(extent, parts)
        different = dict.fromkeys(((blocks.length(i), 2),) for i in range(parts))
        found = [one.shapes for one in calls_of_blocks(rule, (call,), signature, parts)]
        assert found == [*different]


def shares(x: Any, dim: int) -> Any:
    """Each cell's share in the sum along ``dim``."""
    if has_torch_function((x,)):
        return handle_torch_function(shares, (x,), x, dim)
    return x / x.sum(dim, keepdim=True)


def run_shares(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    (x,) = tensors
    assert where.inputs[0].shape == tuple(x.shape) and where.call.args[1] == call.args[1]
    return x / all_sum_reduce(x.sum(call.args[1], keepdim=True), where.P, range(where.P.dim))


def derive_shares(call: Call, parts: int) -> list[SbpSignature]:
    dim = call.args[1]
    return [
        SbpSignature((split(d),), (split(d),), run=run_shares if d == dim else None)
        for d in range(call.tensors[0].dims)
    ]


def shares_here(x: Any, dim: int) -> Any:
    """The same by another rule."""
    if has_torch_function((x,)):
        return handle_torch_function(shares_here, (x,), x, dim)
    return x / x.sum(dim, keepdim=True)


def padded(x: Any, rows: int) -> Any:
    """The first ``rows`` rows twice over, side by side: a size is among the arguments."""
    if has_torch_function((x,)):
        return handle_torch_function(padded, (x,), x, rows)
    return torch.cat([x[:rows], x[:rows]], 1)


def derive_padded(call: Call, parts: int) -> list[SbpSignature]:
    def localize(call: Call, part: AxisPart) -> Call:
        rows = call.args[1]
        return call.with_argument(1, "rows", rows // part.parts + (part.index < rows % part.parts))

    # Only where all rows are kept is a block of the result made from one block.
    whole = call.args[1] == call.tensors[0].shape[0]
    return [SbpSignature((split(0),), (split(0),), localize)] if whole else []


@contextmanager
def entered(function: Any, entry: Rule | Composite) -> Iterator[None]:
    signatures[function] = entry
    try:
        yield
    finally:
        signatures.pop(function, None)


@distributed(ranks=6, transports=("loopback",))
def test_run_over_all_axes_that_split_a_dim(P_world: Partition) -> None:
    placement = Placement("cpu", [[0, 1, 2], [3, 4, 5]], P_world)
    x = random((7, 4)).abs() + 1
    signatures[shares] = Rule(derive_shares)
    for sbp in [(S(0), S(0)), (S(0), S(1)), (S(1), S(0)), (S(1), B), (B, S(0)), (P, S(0))]:
        for dim in (0, 1):
            assert_matches(lambda t, dim=dim: shares(t, dim), [x], placement, [sbp], double=True)


@distributed(ranks=2, transports=("loopback",))
def test_axes_of_one_worker_do_not_run(P_world: Partition) -> None:
    placement = Placement("cpu", [[0], [1]], P_world)
    x = random((7, 4)).abs() + 1
    ran: list[int] = []

    def counted(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
        ran.append(call.args[1])
        return run_shares(call, tensors, where)

    def counting(call: Call, parts: int) -> list[SbpSignature]:
        found = derive_shares(call, parts)
        return [replace(one, run=counted) if one.run is not None else one for one in found]

    signatures[shares_here] = Rule(counting)
    for dim in (0, 1):
        assert_matches(lambda t, dim=dim: shares_here(t, dim), [x], placement, [(S(0), S(1))])
    assert set(ran) == {0}


@distributed(ranks=2, transports=("loopback",))
def test_results_with_names_are_repeated(P_world: Partition) -> None:
    """The second call of a function with named results is not derived, and has the names."""
    x = global_of(random((4, 3)), Placement("cpu", [0, 1], P_world), (S(0),))
    assert not x._global_spec.calls
    first = torch.max(x, 1)
    assert len(x._global_spec.calls) == 1
    again: Any = torch.max(x, 1)
    assert type(again) is type(first) is torch.return_types.max
    torch.testing.assert_close(again.values.full_tensor(), random((4, 3)).max(1).values)
    assert torch.equal(again.indices.full_tensor(), random((4, 3)).max(1).indices)


@distributed(ranks=6, transports=("loopback",))
def test_arguments_of_blocks_of_blocks(P_world: Partition) -> None:
    placement = Placement("cpu", [[0, 1, 2], [3, 4, 5]], P_world)
    signatures[padded] = Rule(derive_padded)
    for sbp in [(S(0), S(0)), (S(0), B), (S(1), S(0))]:
        (y,) = assert_matches(lambda t: padded(t, 7), [random((7, 2))], placement, [sbp])
        assert S(1) not in y.sbp
        (y,) = assert_matches(lambda t: padded(t, 5), [random((7, 2))], placement, [sbp])
        assert y.sbp == (B, B)


@distributed(ranks=6, transports=("loopback",))
def test_rules_that_do_not_say_any_cuts(P_world: Partition) -> None:
    """Explicit cuts are boxed if the rule does not declare that it supports them."""
    placement = Placement("cpu", [[0, 1, 2], [3, 4, 5]], P_world)
    x = random((7, 2)).abs() + 1
    signatures[shares], signatures[padded] = Rule(derive_shares), Rule(derive_padded)
    for function in (lambda t: shares(t, 0), lambda t: padded(t, 7)):
        for sbp in ((S(0, [1, 6]), S(0)), (B, S(0, [0, 0, 7]))):
            with explain() as lines:
                (y,) = assert_matches(function, [x], placement, [sbp])
            assert "boxed to" in lines[0] and all(one.sizes is None for one in y.sbp), lines


@distributed(ranks=2, transports=("loopback",))
def test_wrong_signature_is_found(P_world: Partition) -> None:
    """A result whose shape differs from its signature's raises, instead of a wrong number."""
    placement = Placement("cpu", [0, 1], P_world)
    signatures[_wrong] = Rule(lambda call, parts: [SbpSignature((split(0),), (split(1),))])
    with pytest.raises(RuntimeError, match="but its signature implies"):
        _wrong(global_of(random((4, 3)), placement, (S(0),)))


def _wrong(x: Any) -> Any:
    if has_torch_function((x,)):
        return handle_torch_function(_wrong, (x,), x)
    return x * 2


def test_composite() -> None:
    placement = Placement("cpu", [0])
    with entered(_wrong, Composite(lambda x: x + x)):
        y = _wrong(global_of(random((4,)), placement, (S(0),)))
    torch.testing.assert_close(y.to_local(), 2 * random((4,)))


def test_names_and_keys() -> None:
    assert torch.add in forms("add") and torch.Tensor.add in forms("add")
    with pytest.raises(AttributeError, match="have no 'no_such'"):
        forms("no_such")
    assert name_of(torch.matmul) == "torch.matmul" and name_of(shares) == "shares"
    assert key_of(1) != key_of(True) and key_of(1) != key_of(1.0) and key_of([1]) != key_of((1,))
    assert key_of(slice(0, 2)) == key_of(slice(0, 2))
    with pytest.raises(TypeError):
        key_of(bytearray())


def test_forms_in_place_follow_from_names() -> None:
    assert forms("add", "__add__", "matmul", in_place=True) == [
        torch.Tensor.add_,
        torch.Tensor.__iadd__,
    ]
    assert forms("__eq__") == [torch.Tensor.__eq__]
