"""Calls that are repeated without deriving signatures again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gpudist
from gpudist.geometry.layout import split as S
from gpudist.sbp import Placement
from gpudist.sbp.call_cache import _CachedCall
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
    network = gpudist.distribute(torch.nn.Sequential(alone), P_x, inputs={"input": "split"})
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
    assert isinstance(found, _CachedCall) and found.order is not None
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
