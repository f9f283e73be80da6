"""Attention that drops weights: the same ones in every layout, as one node or composed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist.nn.kernel_choice import as_on_gpu
from gpudist.planning.rehearsal import KeptForBackward
from gpudist.sbp import Placement
from gpudist.sbp.interception import intercept
from gpudist.sbp.scope import Draws, Scope, enter_scope
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, global_of
from tests.sbp.parts import B, S, random

attend: Any = partial(F.scaled_dot_product_attention, dropout_p=0.4)
Q, K, V = random((2, 4, 5, 3)), random((2, 4, 6, 3), 1), random((2, 4, 6, 2), 2)
BIAS, SEEN = random((2, 1, 5, 6), 5), random((5, 6), 6) > -0.5
SEEN[2] = True
# Functions of the tensors, and layouts of each tensor along one axis.
CASES: dict[str, tuple[Any, list[torch.Tensor], list[list[Any]]]] = {
    "plain": (attend, [Q, K, V], [[S(0)] * 3, [S(1)] * 3, [S(2), B, B], [B, B, S(3)], [B] * 3]),
    "causal": (partial(attend, is_causal=True), [Q, K, V], [[S(1)] * 3, [S(2), B, B]]),
    "scale": (partial(attend, scale=0.3), [Q, K, V], [[S(2), B, B]]),
    "bias": (attend, [Q, K, V, BIAS], [[S(0)] * 4, [S(2), B, B, S(2)]]),
    "mask": (attend, [Q, K, V, SEEN], [[S(1), S(1), S(1), B], [S(2), B, B, S(0)]]),
    "groups": (partial(attend, enable_gqa=True), [Q, K[:, :2], V[:, :2]], [[S(0)] * 3, [S(1)] * 3]),
    "shared keys": (attend, [Q, K[:1, :1], V], [[S(0), B, S(0)], [S(2), B, B]]),
    "everything": (partial(attend, dropout_p=1.0), [Q, K, V], [[S(2), B, B]]),
}


def _all_gradients(y: torch.Tensor, xs: Sequence[Any]) -> list[torch.Tensor]:
    xs = [x for x in xs if x.requires_grad]
    by_node = torch.autograd.grad(y, xs, _seed(y), retain_graph=True)
    first = torch.autograd.grad(y, xs, _seed(y), create_graph=True)
    second = torch.autograd.grad(first, xs, [_seed(x) for x in first], allow_unused=True)
    return [*by_node, *first, *second]


def _seed(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, 1 + x.numel(), dtype=x.dtype).view(x.shape).cos()


@pytest.mark.parametrize("name", CASES)
@distributed(ranks=2, transports=("loopback",))
def test_every_layout_drops_the_same_weights(P_world: Partition, name: str) -> None:
    """Values and gradients equal those of plain tensors, on a CPU and as on a GPU."""
    function, xs, layouts = CASES[name]
    wants = [x.is_floating_point() for x in xs]
    leaves = [x.clone().requires_grad_(want) for x, want in zip(xs, wants, strict=True)]
    with intercept(Draws(seed=3)):
        whole = function(*leaves)
    expected = _all_gradients(whole, leaves)
    placement = Placement("cpu", [0, 1], P_world)
    for layout in layouts:
        for context in (nullcontext(), as_on_gpu()):
            given = [
                global_of(x, placement, (sbp,), want)
                for x, sbp, want in zip(xs, layout, wants, strict=True)
            ]
            with context, enter_scope(Scope(placement, seed=3)):
                y = function(*given)
            assert_global(y, whole)
            for own, other in zip(_all_gradients(y, given), expected, strict=True):
                assert (own is None) == (other is None)
                if own is not None:
                    assert_global(own, other, str(layout))


@distributed(ranks=4, transports=("loopback", "host"))
def test_a_worker_without_cells_takes_part_in_the_draw(P_world: Partition) -> None:
    """Outside a network, where the first worker draws a seed for all."""
    torch.manual_seed(P_world.rank or 0)
    placement = Placement("cpu", range(4), P_world)
    x: Any = global_of(torch.ones(3, 2, 8, 4), placement, (S(0),))
    y: Any = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    y = y.full_tensor()
    found = P_world.allgather_data(y.flatten().tolist())
    assert all(row == found[0] for row in found) and len(set(found[0])) > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@distributed(ranks=1, transports=("loopback",))
def test_devices_keep_no_weights(P_world: Partition, dtype: torch.dtype) -> None:
    """Backward computes the same weights again, to the bit, and drops the same ones."""
    placement = Placement("cpu", [0], P_world)
    xs = [random((2, 4, 64, 3), seed).to(dtype) for seed in range(3)]
    found: list[tuple[int, list[torch.Tensor]]] = []
    for context in (nullcontext(), as_on_gpu()):
        q, k, v = (global_of(x, placement, (B,), True) for x in xs)
        kept = KeptForBackward()
        with context, enter_scope(Scope(placement, seed=3)), kept:
            y = attend(q, k, v, is_causal=True)
        results: tuple[Any, ...] = (y, *torch.autograd.grad(y.square().sum(), [q, k, v]))
        found.append((kept.nbytes, [x.to_local() for x in results]))
    (with_weights, expected), (without, again) = found
    # Weights of 16-bit scores are in single precision.
    weights_nbytes = 2 * 4 * 64 * 64 * max(4, dtype.itemsize)
    assert with_weights > weights_nbytes > without
    assert all(map(torch.equal, expected, again))


@distributed(ranks=1, transports=("loopback",))
def test_gradients_under_autocast(P_world: Partition) -> None:
    """Backward, outside of autocast, has the dtypes of forward."""
    placement = Placement("cpu", [0], P_world)
    found: list[list[torch.Tensor]] = []
    for dtype in (torch.float32, torch.bfloat16):
        xs = [global_of(x.float(), placement, (B,), True) for x in (Q, K, V, BIAS)]
        cast = torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32)
        with as_on_gpu(), enter_scope(Scope(placement, seed=3)), cast:
            y = attend(*xs)
        assert y.dtype == dtype
        gradients = torch.autograd.grad(y.float().square().sum(), xs)
        results: tuple[Any, ...] = (y.float(), *gradients)
        found.append([x.to_local() for x in results])
    for wide, low in zip(*found, strict=True):
        assert low.dtype == torch.float32 and not torch.equal(wide, low)
        torch.testing.assert_close(low, wide, atol=0.05, rtol=0.05)


@distributed(ranks=1, transports=("loopback",))
def test_refuses_a_mask_beside_causal_queries(P_world: Partition) -> None:
    placement = Placement("cpu", [0], P_world)
    xs = [global_of(x, placement, (B,)) for x in (Q, K, V, BIAS)]
    with pytest.raises(RuntimeError, match="attn_mask or is_causal"):
        attend(*xs, is_causal=True)


@distributed(ranks=2, transports=("loopback",))
def test_a_query_that_sees_no_key_gives_zeros(P_world: Partition) -> None:
    """Output and gradients are zero there, as torch's are, however many weights are dropped."""
    placement = Placement("cpu", [0, 1], P_world)
    seen = torch.ones(5, 6, dtype=torch.bool)
    seen[1] = False
    assert not F.scaled_dot_product_attention(Q, K, V, seen, 0.4)[:, :, 1].any()
    for mask in (seen, torch.zeros(5, 6, dtype=Q.dtype).masked_fill(~seen, -torch.inf)):
        for context in (nullcontext(), as_on_gpu()):
            xs = [global_of(x, placement, (B,), True) for x in (Q, K, V)]
            with context, enter_scope(Scope(placement, seed=3)):
                y = attend(*xs, global_of(mask, placement, (B,)))
                results: tuple[Any, ...] = torch.autograd.grad(y.square().sum(), xs)
            gradients = [x.to_local() for x in results]
            assert not y.to_local()[:, :, 1].any() and y.to_local()[:, :, 2].all()
            assert not gradients[0][:, :, 1].any()
            assert all(x.isfinite().all() and x.any() for x in gradients)
