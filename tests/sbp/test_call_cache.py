"""Calls that are repeated without deriving signatures again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gpudist
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.layout import split as S
from gpudist.sbp import Placement, broadcast
from gpudist.sbp.bound_call import BoundCall
from gpudist.sbp.call import key_of
from gpudist.sbp.scope import Scope, enter_scope
from gpudist.sbp.signatures import channel_norms
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import global_of

X = torch.linspace(-2, 3, 4 * 6 * 5).reshape(4, 6, 5).sin()


@distributed(ranks=[1, 2], transports=["loopback"])
def test_a_composite_of_one_operator(P_world: Partition) -> None:
    """Batch norm passes its tensors on in another order; later calls skip the composite."""
    P_x = P_world.create_cartesian_topology_partition([P_world.size, 1, 1])
    torch.manual_seed(0)
    alone = torch.nn.BatchNorm1d(6)
    network = gpudist.distribute(
        torch.nn.Sequential(copy.deepcopy(alone)), P_x, inputs={"input": "split"}
    )
    norm: Any = network[0]
    for step in range(8):
        if step == 4:
            alone.momentum = norm.momentum = 0.5
        for one in (alone, network):
            one.train(step % 4 != 3)
        x = X + step
        expected, y = alone(x), network(x).full_tensor()
        torch.testing.assert_close(y, expected)
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(getattr(norm, name), buffer)


@distributed(ranks=1, transports=["loopback"])
def test_composites_are_not_called_again(
    P_world: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_norms, "_momenta", set())
    placement = Placement("cpu", [0], P_world)
    x: Any = global_of(X, placement, (S(0),))
    moments = torch.zeros(6), torch.ones(6)
    weight, bias = torch.ones(6), torch.zeros(6)
    with enter_scope(Scope(placement)):
        F.batch_norm(x, *moments, weight, bias, True)
    (found,) = [v for k, v in x._global_spec.calls.items() if k[0] is F.batch_norm]
    assert isinstance(found, BoundCall) and found.order is not None
    assert found.operator.function is channel_norms.updating_batch_norm


@pytest.mark.parametrize("p", [0.5, 1.0])
@distributed(ranks=[1, 2], transports=["loopback"])
def test_draws_are_counted_whenever_a_call_is_repeated(P_world: Partition, p: float) -> None:
    """Also if the first call was outside a network, which has no count."""
    placement = Placement("cpu", list(range(P_world.size)), P_world)
    x: Any = global_of(torch.ones(40, 10), placement, (S(0),))
    F.dropout(x, p)
    masks: list[Any] = []
    for scope in (Scope(placement, seed=1), Scope(placement, seed=1), Scope(placement, seed=2)):
        with enter_scope(scope):
            masks += [F.dropout(x, p) for _ in range(4)]
        assert scope.draws == 4
        F.dropout(x, p)
    masks = [one.full_tensor() for one in masks]
    for i, first in enumerate(masks):
        for k, second in enumerate(masks[:i]):
            assert torch.equal(first, second) == (p == 1 or i - k == 4 <= i < 8), (i, k)


@distributed(ranks=1, transports=["loopback"])
def test_autocast_that_is_off_within_a_composite(P_world: Partition) -> None:
    """Torch computes these in single precision; a repeated call does, too."""
    placement = Placement("cpu", [0], P_world)
    for dtype in (torch.float32, torch.bfloat16):
        whole = X.to(dtype)
        part: Any = global_of(whole, placement, (S(0),))
        moments = [(torch.zeros(6), torch.ones(6)) for _ in range(2)]
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16), enter_scope(Scope(placement)):
                expected = F.batch_norm(whole, *moments[0], training=True)
                y: Any = F.batch_norm(part, *moments[1], training=True)
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y.full_tensor(), expected)


@distributed(ranks=1, transports=["loopback"])
def test_a_flag_of_torch_is_read_at_each_call(
    P_world: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = Placement("cpu", [0], P_world)
    x: Any = global_of(X, placement, (S(0),))
    moments = torch.zeros(6), torch.ones(6)
    flags: list[bool] = []
    original = torch.batch_norm

    def batch_norm(*args: Any) -> torch.Tensor:
        flags.append(args[-1])
        return original(*args)

    monkeypatch.setattr(torch, "batch_norm", batch_norm)
    for on in (True, True, False):
        with torch.backends.cudnn.flags(enabled=on), enter_scope(Scope(placement)):
            F.batch_norm(x, *moments)
    assert flags == [True, True, False]


def changing() -> dict[str, list[Callable[[Any], Any]]]:
    """Calls that differ in one thing that their result depends on, in this order."""
    position, array, numbers = torch.tensor(0), np.array([0, 1]), [0, 1]

    def at(value: int) -> torch.Tensor:
        return position.fill_(value)

    def indices(first: int) -> Any:
        array[0] = first
        return array

    def rows(first: int) -> list[int]:
        numbers[0] = first
        return numbers

    def with_default(dtype: torch.dtype, call: Callable[[], Any]) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return call()
        finally:
            torch.set_default_dtype(before)

    def cast(dtype: torch.dtype, call: Callable[[], Any]) -> Any:
        with torch.autocast("cpu", dtype):
            return call()

    dtypes = (torch.float32, torch.float64)
    low = (torch.bfloat16, torch.float16)
    weight = torch.linspace(-1, 1, 15).reshape(3, 5)
    calls: dict[str, list[Callable[[Any], Any]]] = {
        "slice bound, a tensor changed in place": [lambda x, n=n: x[:, at(n) :] for n in (1, 2, 4)],
        "end of a slice": [lambda x, n=n: x[:, :, : at(n)] for n in (1, 3)],
        "index, an array changed in place": [lambda x, n=n: x[:, indices(n)] for n in (2, 3)],
        "index, a list changed in place": [lambda x, n=n: x[:, rows(n)] for n in (2, 3)],
        "sign of zero": [lambda x, zero=zero: torch.copysign(x, zero) for zero in (0.0, -0.0)],
        "number or truth": [lambda x, n=n: (x * n).dtype == x.dtype for n in (1, True, 1.0)],
        "tensor or number": [lambda x, n=n: x.add(n) for n in (2, 2.5, torch.tensor(3.0))],
        "alpha": [lambda x, n=n: torch.add(x, x, alpha=n) for n in (1, 2)],
        "dtype": [lambda x, dtype=dtype: x.sum(dtype=dtype) for dtype in dtypes],
        "default dtype": [
            lambda x, d=d: with_default(d, lambda: (x > 0) / 3) for d in (*dtypes, dtypes[0])
        ],
        "autocast": [lambda x, d=d: cast(d, lambda: F.linear(x, weight)) for d in (*low, low[0])],
        "tuple or list": [lambda x, n=n: x.permute(n) for n in ((0, 2, 1), [0, 1, 2])],
        "shape of a plain tensor": [
            lambda x, n=n: x + torch.ones(()).expand(n) for n in ((5,), (6, 5))
        ],
        "a string": [lambda x, how=how: F.gelu(x, approximate=how) for how in ("none", "tanh")],
        "keyword": [lambda x, how=how: x.amax(1, **how) for how in ({}, {"keepdim": True})],
    }
    return calls


@distributed(ranks=2, transports=["loopback"])
def test_a_key_holds_what_the_result_depends_on(P_world: Partition) -> None:
    """Every call equals torch's, in a network and outside, one after the other and twice."""
    placement = Placement("cpu", [0, 1], P_world)
    variants, count = changing(), 0
    for sbp in (S(0), S(1), broadcast):
        x: Any = global_of(X, placement, (sbp,))
        for context in (enter_scope(Scope(placement)), nullcontext()):
            with context, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for name, calls in variants.items():
                    for call in calls * 2:
                        expected = call(X)
                        try:
                            found: Any = call(x)
                        except (PartitionError, ShapeError, NotImplementedError):
                            # A plain tensor, outside a network.
                            assert isinstance(context, nullcontext), name
                            continue
                        count += 1
                        if not isinstance(found, torch.Tensor):
                            assert found == expected, name
                            continue
                        whole: Any = getattr(found, "full_tensor", lambda y=found: y)()
                        assert whole.dtype == expected.dtype, name
                        assert torch.equal(whole.signbit(), expected.signbit()), name
                        torch.testing.assert_close(whole, expected, rtol=1e-2, atol=1e-3, msg=name)
    assert count > 150


def test_keys_tell_values_apart_that_cannot_change() -> None:
    for value in (np.ones(2), object(), abs, lambda x: x, torch.ones(1), {1}, [{"a": object()}]):
        with pytest.raises(TypeError, match="may change"):
            key_of(value)
    values = [
        1, True, 1.0, 1j, 0.0, -0.0, "1", b"1", None, ..., (1,), [1], {"1": 1}, slice(1), (None, 1),
        torch.float32, torch.strided, torch.channels_last, torch.device("cpu"), S(1), float("nan"),
    ]  # fmt: skip
    assert len({key_of(value) for value in values}) == len(values)
    assert [key_of(value) for value in values] == [key_of(value) for value in values]
