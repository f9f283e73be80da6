"""Random numbers of converted networks: the same on any layout, without a message."""

# Operators of global tensors are typed as torch types them: their results are Tensors.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.ledger.counting import Counting
from gpudist.geometry.boxes import Box
from gpudist.nn.random.cells import Cells, Key, normal_by_index, uniform_by_index
from gpudist.sbp import Placement, explain
from gpudist.sbp.scope import Scope, enter_scope
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import global_of
from tests.sbp.parts import B, S, random

X = random((4, 6, 5))
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "torch's dropout": lambda x: torch.dropout(x, 0.4, True),
    "of channels": lambda x: F.dropout2d(x, 0.4),
    "of channels of a sample": lambda x: F.dropout1d(x[0], 0.4),
    "alpha": lambda x: F.alpha_dropout(x, 0.4, True),
    "alpha of channels": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "uniform": lambda x: torch.rand_like(x),
    "normal": lambda x: torch.randn_like(x, dtype=torch.float32),
    "filled": lambda x: torch.empty_like(x).uniform_(-1, 2) + torch.empty_like(x).normal_(1, 3),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + torch.zeros_like(x).bernoulli_(0.3),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True, dim=1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@distributed(ranks=4, transports=("loopback",))
def test_same_on_any_layout(P_world: Partition, name: str) -> None:
    """Values and gradients, and other ones at the next call."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    found: list[tuple[torch.Tensor, ...]] = []
    for sbp in ((B, B), (S(0), S(1)), (S(1), S(1)), (S(2), B), (S(2), S(0))):
        x: Any = global_of(X, placement, sbp, True)
        with enter_scope(Scope(placement, seed=3)):
            y, again = FUNCTIONS[name](x), FUNCTIONS[name](x)
        slope = torch.zeros_like(X)
        if y.requires_grad:
            (g,) = torch.autograd.grad([y], [x], [torch.ones(y.shape, dtype=y.dtype)])
            slope = g.full_tensor()
        found.append((y.full_tensor(), again.full_tensor(), slope))
    for values in found[1:]:
        for one, other in zip(values, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    assert not torch.equal(found[0][0], found[0][1])


# Passes over the block of torch's kernels on a GPU: in its dtype, and of the mask of dropout.
PASSES: dict[str, tuple[int, int]] = {
    "dropout": (2, 1), "uniform": (1, 0), "normal": (1, 0), "bernoulli": (2, 0),
}  # fmt: skip
DRAWS: dict[str, Callable[[Any], Any]] = {
    "dropout": FUNCTIONS["dropout"],
    "uniform": torch.rand_like,
    "normal": torch.randn_like,
    "bernoulli": torch.bernoulli,
}


def costs(call: Callable[[], Any]) -> tuple[int, int]:
    """Return the launches and bytes of a call on a GPU."""
    with Counting() as counting:
        call()
    counts = counting.counts()
    return counts.launches, counts.size_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(ranks=2, transports=("nccl",))
def test_costs_of_a_draw_on_a_gpu(P_world: Partition, dtype: torch.dtype) -> None:
    """At most 3 launches, and 1.2 times the bytes of torch's kernel, forward and backward."""
    if not is_built():
        pytest.skip(what_is_missing())
    placement = Placement("cpu", [0, 1], P_world)
    x: Any = global_of(random((8, 64, 32)).sigmoid().to(dtype), placement, (S(1),))
    for name, function in DRAWS.items():
        of_block, of_mask = PASSES[name]
        least = of_block * dtype.itemsize * x.numel() / 2
        most = 1.2 * (least + of_mask * x.numel() / 2)
        leaf = x.detach().requires_grad_(name == "dropout")
        # The step of a network: its draws share a seed, which ranks agree on once.
        with enter_scope(Scope(placement)):
            y = function(leaf)
            found = [costs(lambda function=function, leaf=leaf: function(leaf))]
        if name == "dropout":
            g = torch.ones_like(y)
            found.append(costs(lambda y=y, leaf=leaf, g=g: torch.autograd.grad(y, leaf, g)))
        for launches, size_bytes in found:
            assert 1 <= launches <= 3, (name, launches)
            assert least <= size_bytes <= most, (name, size_bytes, least, most)


@distributed(ranks=2, transports=("loopback",))
def test_without_messages(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    x: Any = global_of(X, placement, (S(1),))
    with enter_scope(Scope(placement)) as scope, explain() as lines:
        y = F.dropout(x, 0.5) + torch.rand_like(x)
    assert scope.draws == 2 and y.sbp == (S(1),)
    assert all(line.endswith("; 0 bytes boxed") for line in lines)


@distributed(ranks=2, transports=("loopback",))
def test_shares(P_world: Partition) -> None:
    """About as much is dropped as asked for, and the mean stays; evaluation keeps all."""
    placement = Placement("cpu", [0, 1], P_world)
    ones: Any = global_of(torch.ones(200, 100, dtype=torch.float64), placement, (S(0),))
    with enter_scope(Scope(placement)):
        y = F.dropout(ones, 0.3).full_tensor()
        z = F.alpha_dropout(torch.randn_like(ones), 0.3, True).full_tensor()
    assert abs(float((y == 0).double().mean()) - 0.3) < 0.02
    torch.testing.assert_close(y[y > 0], torch.full_like(y[y > 0], 1 / 0.7))
    assert abs(float(z.mean())) < 0.05 and abs(float(z.std()) - 1) < 0.05
    assert torch.equal(F.dropout(ones, 0.3, False).full_tensor(), ones.full_tensor())
    assert not F.dropout(ones, 1.0).full_tensor().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_by_index(dtype: torch.dtype) -> None:
    """Moments of both kinds, and that a part is that of the whole."""
    key, shape = Key(torch.tensor(5), torch.tensor(1)), (300, 200)
    whole = Cells(Box.whole(shape), shape)
    device = torch.device("cpu")
    uniform = uniform_by_index(key, whole, dtype, device)
    assert uniform.dtype == dtype and uniform.min() >= 0 and uniform.max() < 1
    wide = uniform.double()
    assert abs(float(wide.mean()) - 0.5) < 0.01 and abs(float(wide.var()) - 1 / 12) < 0.005
    normal = normal_by_index(key, whole, dtype, device).double()
    assert abs(float(normal.mean())) < 0.02 and abs(float(normal.std()) - 1) < 0.02
    assert abs(float((normal.abs() < 1).double().mean()) - 0.6827) < 0.01
    part = Box((10, 20), (50, 33))
    for by, all_of_them in ((uniform_by_index, uniform), (normal_by_index, normal)):
        found = by(key, Cells(part, shape), dtype, device)
        assert torch.equal(found.to(all_of_them.dtype), all_of_them[part.slices])
