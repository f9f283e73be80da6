"""Normalizations and activations against torch, with gradients, and their tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gpudist.nn as gnn
from gpudist.sbp import Placement
from gpudist.sbp.scope import Scope, enter_scope
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, assert_matches, global_of
from tests.sbp.parts import B, P, S, random
from tests.sbp.tables import Row, assert_everywhere, assert_table

X = random((5, 2, 7))
GROUPS = random((2, 6, 5))
IMAGES = random((2, 3, 4, 5))
NUMBERS, MORE = random((7,), 1), random((7,), 2)
PAIRS, MORE_PAIRS = random((2, 7), 1), random((2, 7), 2)
CHANNELS, SHIFTS = random((6,), 3), random((6,), 4)

LEADING: list[Row] = [([S(0), B, B], S(0)), ([S(1), B, B], S(1)), ([B, B, B], B)]
CHANNEL: list[Row] = [([S(1), S(0), S(0)], S(1)), ([B, B, B], B)]

OPERATORS: dict[str, tuple[Any, list[torch.Tensor], list[Row]]] = {
    "layer": (
        lambda x, w, b: F.layer_norm(x, (7,), w, b),
        [X, NUMBERS, MORE],
        [*LEADING, ([S(2), S(0), S(0)], S(2))],
    ),
    "layer of two dims": (
        lambda x, w, b: F.layer_norm(x, (2, 7), bias=b, weight=w, eps=0.1),
        [X, PAIRS, MORE_PAIRS],
        [LEADING[0], ([S(1), S(0), S(0)], S(1)), ([S(2), S(1), S(1)], S(2))],
    ),
    "plain layer": (lambda x: F.layer_norm(x, (7,)), [X], [([S(2)], S(2))]),
    "rms": (
        lambda x, w: F.rms_norm(x, (7,), w), [X, NUMBERS], [([S(2), S(0)], S(2)), ([B, B], B)],
    ),
    "batch": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        [GROUPS, CHANNELS, SHIFTS],
        [*CHANNEL, ([S(0), B, B], S(0)), ([S(2), B, B], S(2))],
    ),
    "torch's batch": (
        lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-3, False),
        [GROUPS, CHANNELS, SHIFTS],
        [*CHANNEL, ([S(0), B, B], S(0)), ([S(2), B, B], S(2))],
    ),
    "batch with a bias alone": (
        lambda x, b: F.batch_norm(x, None, None, None, b, True),
        [GROUPS, SHIFTS],
        [([S(1), S(0)], S(1)), ([S(2), B], S(2))],
    ),
    "instance": (
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        [GROUPS, CHANNELS, SHIFTS],
        [*CHANNEL, ([S(0), B, B], S(0)), ([S(2), B, B], S(2))],
    ),
    "torch's instance": (
        lambda x: torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-3, False),
        [IMAGES],
        [([S(2)], S(2)), ([S(3)], S(3)), ([S(0)], S(0))],
    ),
    "group": (
        lambda x, w, b: F.group_norm(x, 3, w, b),
        [GROUPS, CHANNELS, SHIFTS],
        [*CHANNEL, ([S(0), B, B], S(0)), ([S(2), B, B], S(2))],
    ),
    "group of cut groups": (
        lambda x, w, b: torch.group_norm(x, 2, w, b, 1e-3),
        [GROUPS, CHANNELS, SHIFTS],
        [*CHANNEL, ([S(0), B, B], S(0)), ([S(2), B, B], S(2))],
    ),
    "layer without a weight": (
        lambda x, b: torch.layer_norm(x, (7,), None, b), [X, MORE], [([S(2), S(0)], S(2))],
    ),
    "local response": (
        lambda x: F.local_response_norm(x, 3), [IMAGES], [([S(0)], S(0)), ([S(3)], S(3))],
    ),
    "prelu": (F.prelu, [GROUPS, CHANNELS], [([S(1), S(0)], S(1)), ([S(0), B], S(0))]),
    "glu": (F.glu, [GROUPS[..., :4]], [([S(0)], S(0)), ([S(1)], S(1))]),
    "normalize": (F.normalize, [GROUPS], [([S(0)], S(0)), ([S(2)], S(2)), ([S(1)], S(1))]),
    "softshrink": (F.softshrink, [GROUPS], [([S(0)], S(0)), ([S(1)], S(1)), ([B], B)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
@distributed(ranks=8, transports=("loopback",))
def test_operators(P_world: Partition, name: str) -> None:
    function, xs, rows = OPERATORS[name]
    assert_table(P_world, function, xs, rows)
    assert_everywhere(P_world, function, xs, (1, 2, 1), double=False)


@distributed(ranks=4, transports=("loopback",))
def test_running_moments(P_world: Partition) -> None:
    """Running moments have any layout and include all ranks; evaluation uses them."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    for x_sbp, own in (((S(0), S(1)), (B, S(0))), ((S(2), B), (S(0), B)), ((B, P), (B, B))):
        mean, variance = CHANNELS.clone(), SHIFTS.abs()
        means: Any = global_of(mean, placement, own)
        variances: Any = global_of(variance, placement, own)
        for _ in range(2):
            y: Any = global_of(GROUPS, placement, x_sbp)
            expected = F.batch_norm(GROUPS, mean, variance, training=True, momentum=0.3)
            assert_global(F.batch_norm(y, means, variances, training=True, momentum=0.3), expected)
        assert means.sbp == own and variances.sbp == own
        assert_global(means, mean)
        assert_global(variances, variance)

    def evaluated(x: Any, m: Any, v: Any) -> Any:
        return F.batch_norm(x, m.detach(), v.detach().abs()) + m.sum() + v.sum()

    sbps = [(S(0), S(1)), (B, B), (S(0), B)]
    assert_matches(evaluated, [GROUPS, CHANNELS, SHIFTS], placement, sbps)


@distributed(ranks=4, transports=("loopback", "host"))
def test_plain_running_moments(P_world: Partition) -> None:
    """Running moments of a converted network are whole, and stay equal on all workers."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    for layer, expected in (
        (torch.nn.BatchNorm1d(6, momentum=None), torch.nn.BatchNorm1d(6, momentum=None)),
        (torch.nn.BatchNorm1d(6), torch.nn.BatchNorm1d(6)),
        (
            torch.nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
            torch.nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        ),
    ):
        layer, expected = layer.double(), expected.double()
        for x_sbp in ((S(0), S(1)), (S(2), B), (S(2), S(0)), (S(2), S(2)), (B, P)):
            y: Any = global_of(GROUPS, placement, x_sbp)
            with enter_scope(Scope(placement)):
                assert_global(layer(y), expected(GROUPS))
            for own, other in zip(layer.buffers(), expected.buffers(), strict=True):
                torch.testing.assert_close(own, other)
                cells = own.reshape(-1).tolist()
                assert P_world.allgather_data(cells) == [cells] * 4
        layer.eval()
        expected.eval()
        with enter_scope(Scope(placement)):
            assert_global(layer(y), expected(GROUPS))


@distributed(ranks=2, transports=("loopback",))
def test_large_mean(P_world: Partition) -> None:
    """Squares are about the mean, so that the digits of float32 last."""
    placement = Placement("cpu", [0, 1], P_world)
    x = (X + 1e3).float()
    y: Any = F.layer_norm(global_of(x, placement, (S(2),)), (7,))
    whole = F.layer_norm(x.double(), (7,)).float()
    torch.testing.assert_close(y.full_tensor(), whole, atol=1e-3, rtol=1e-3)


AS_LAYERS: dict[str, tuple[Any, Any]] = {
    "batch": (
        lambda P: gnn.DistributedBatchNorm2d(P, 4, affine=False, track_running_stats=False),
        lambda x: F.batch_norm(x, None, None, training=True),
    ),
    "instance": (lambda P: gnn.DistributedInstanceNorm2d(P, 4), F.instance_norm),
    "group": (
        lambda P: gnn.DistributedGroupNorm(P, 2, 4, affine=False),
        lambda x: F.group_norm(x, 2),
    ),
    "layer": (
        lambda P: gnn.DistributedLayerNorm(P, (6, 5), elementwise_affine=False),
        lambda x: F.layer_norm(x, (6, 5)),
    ),
    "rms": (
        lambda P: gnn.DistributedRMSNorm(P, (6, 5), elementwise_affine=False),
        lambda x: F.rms_norm(x, (6, 5)),
    ),
    "softmax": (lambda P: gnn.DistributedSoftmax(P, 2), partial(F.softmax, dim=2)),
    "log-softmax": (lambda P: gnn.DistributedLogSoftmax(P, 2), partial(F.log_softmax, dim=2)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", AS_LAYERS)
@distributed(ranks=2, transports=("loopback",))
def test_bits_and_messages_of_the_layers(P_world: Partition, name: str, dtype: torch.dtype) -> None:
    make, function = AS_LAYERS[name]
    layer, placement = make(P_world.grid(1, 1, 2, 1)), Placement("cpu", [0, 1], P_world)
    x = global_of(random((2, 4, 6, 5)).to(dtype), placement, (S(2),), True)
    block = x.to_local().detach().clone().requires_grad_()
    # At the first call, ranks agree on the blocks.
    layer(block)
    counts = [P_world.wire.recorder.count]
    y = layer(block)
    counts.append(P_world.wire.recorder.count)
    z = function(x)
    counts.append(P_world.wire.recorder.count)
    assert counts[2] - counts[1] == counts[1] - counts[0]
    assert torch.equal(z.to_local(), y)
    (of_block,) = torch.autograd.grad(y, block, torch.ones_like(y))
    of_x: Any = torch.autograd.grad(z, x, torch.ones_like(z.detach()))[0]
    assert torch.equal(of_x.to_local(), of_block)


@distributed(ranks=3, transports=("loopback",))
def test_groups_of_one_cell(P_world: Partition) -> None:
    """torch counts the samples, too, and refuses one cell; blocks of one sample may have it."""
    placement = Placement("cpu", [0, 1, 2], P_world)
    function = partial(F.group_norm, num_groups=2)
    assert_matches(function, [random((3, 2, 1))], placement, [(S(0),)])
    both = Placement("cpu", [[0, 1, 2]], P_world)
    assert_matches(function, [random((2, 2, 6))], both, [(S(0), S(2))])
    with pytest.raises(ValueError, match="more than 1 value"):
        function(global_of(random((1, 2, 1)), placement, (S(0),)))
