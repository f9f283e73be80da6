"""torch.optim on global parameters, unchanged, against the same steps on whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.geometry.layout import NdSbp
from gpudist.sbp import GlobalTensor, Placement, to_global
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, assert_matches, global_of
from tests.sbp.parts import B, P, S, random

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"maximize": True}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
}
SBPS: dict[str, tuple[NdSbp, NdSbp]] = {
    "copies": ((B, B), (S(0), B)),
    "columns": ((S(0), B), (B, S(0))),
    "mixed": ((S(1), S(0)), (S(0), S(1))),
}


def model(placement: Placement | None, sbp: NdSbp) -> torch.nn.Module:
    torch.manual_seed(3)
    made = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    made = made.double()
    if placement is not None:
        layers: list[Any] = [made[0], made[2]]
        for layer in layers:
            weight, bias = layer.weight.detach(), layer.bias.detach()
            layer.weight = torch.nn.Parameter(global_of(weight, placement, sbp))
            own = tuple(B if one == S(1) else one for one in sbp)
            layer.bias = torch.nn.Parameter(global_of(bias, placement, own))
    return made


def step(net: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    y = net(x)
    weights = torch.ones_like(y).flatten()
    (y * y).flatten().dot(weights).backward()
    optimizer.step()


@pytest.mark.parametrize("way", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(ranks=4, transports=("loopback",))
def test_steps(P_world: Partition, name: str, way: str) -> None:
    """After three steps, parameters equal the sequential ones, with unchanged layouts."""
    kind, options = OPTIMIZERS[name]
    if way == "fused" and name == "rmsprop":
        pytest.skip("torch has no fused RMSprop")
    if way != "plain":
        options = {**options, way: True}
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x = random((7, 5))
    for layout in SBPS if name == "adam" else ("mixed",):
        parameters, data = SBPS[layout]
        nets = [model(None, ()), model(placement, parameters)]
        xs = [x, global_of(x, placement, data)]
        for net, given in zip(nets, xs, strict=True):
            optimizer = kind(net.parameters(), lr=0.01, **options)
            for _ in range(3):
                step(net, optimizer, given)
        lies = model(placement, parameters)
        for a, b, c in zip(*(net.parameters() for net in (*nets, lies)), strict=True):
            assert isinstance(b, GlobalTensor) and isinstance(c, GlobalTensor)
            assert b.sbp == c.sbp
            assert_global(b, a, f"{name} {parameters}")


@distributed(ranks=2, transports=("loopback",))
def test_step_sizes_derive_nothing_anew(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    net = to_global(torch.nn.Linear(4, 2), placement, B)
    optimizer = torch.optim.Adam(net.parameters())
    x = to_global(torch.ones(1, 4), placement, S(0))
    counts: list[int] = []
    remembered: Any = P_world.wire.remembered
    for _ in range(3):
        step(net, optimizer, x)
        counts.append(len(remembered["derivations"]))
    assert counts[1] == counts[2]
    x = global_of(random((4,)), placement, (S(0),))
    for factor in (1.5, 2.5):
        assert_global(x * factor, factor * random((4,)))


@distributed(ranks=2, transports=("loopback",))
def test_linear_in_several_tensors(P_world: Partition) -> None:
    """Terms of all that the function is linear in together."""
    placement = Placement("cpu", [0, 1], P_world)
    xs = [random((5, 3)), random((3,), 1), random((5, 1), 2).abs() + 1]
    for function, given in (
        (lambda x, a, b: torch.addcmul(x, a, b, value=0.3), (P, P, B)),
        (lambda x, a, b: torch.addcmul(x, a, b, value=0.3), (P, B, P)),
        (lambda x, a, b: torch.addcdiv(x, a, b, value=0.3), (P, P, B)),
        (lambda x, a, b: x.lerp(a, b), (P, P, B)),
        (lambda x, a, b: torch.addcmul(x, a, b), (S(0), B, S(0))),
        (lambda x, a, b: torch.addcdiv(x, a, b), (S(1), S(0), B)),
    ):
        (y,) = assert_matches(function, xs, placement, [(one,) for one in given], double=True)
        assert y.sbp == (given[0],)


@distributed(ranks=2, transports=("loopback",))
def test_each_of_lists(P_world: Partition) -> None:
    """``torch._foreach_*`` with a number, a list of numbers, a tensor, and lists of tensors."""
    placement = Placement("cpu", [0, 1], P_world)

    def all_of_them(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        xs, ys = [x.clone(), y.clone()], [y.square(), x.square()]
        torch._foreach_add_(xs, 1.5)
        torch._foreach_mul_(xs, [2.0, 3.0])
        torch._foreach_addcdiv_(xs, ys, torch._foreach_add(ys, 1.0), [0.5, -0.5])
        torch._foreach_addcmul_(xs, ys, ys, value=0.1)
        torch._foreach_lerp_(xs, ys, 0.3)
        torch._foreach_maximum_(xs, ys)
        torch._foreach_div_(xs, torch.tensor(3.0))
        torch._foreach_copy_(ys, torch._foreach_neg(xs))
        return [*xs, *ys, *torch._foreach_sub(xs, ys, alpha=2)]

    shapes = [random((4, 3)), random((4, 3), 1)]
    for given in ((S(0), S(0)), (S(1), S(1)), (B, B), (B, S(0))):
        with torch.no_grad():
            assert_matches(all_of_them, shapes, placement, [(one,) for one in given])


@distributed(ranks=2, transports=("loopback",))
def test_fused_steps_take_aligned_lists(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    x = global_of(random((4, 2)), placement, (S(0),))
    with pytest.raises(NotImplementedError, match=r"_fused_sgd_: .* laid out .* use fused=False"):
        torch._fused_sgd_(
            [x], [x.to_global(sbp=S(1))], [], weight_decay=0.0, momentum=0.0, lr=0.1,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip


@pytest.mark.parametrize("foreach", [None, True])
@distributed(ranks=4, transports=("loopback",))
def test_clip_by_norm(P_world: Partition, foreach: bool | None) -> None:
    """The norm is that of the whole gradients, of any attributes, and so are the clipped ones."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x = random((7, 5))
    parameters, data = SBPS["mixed"]
    nets = [model(None, ()), model(placement, parameters)]
    for net, given in zip(nets, [x, global_of(x, placement, data)], strict=True):
        y = net(given)
        (y * y).flatten().dot(torch.ones_like(y).flatten()).backward()
    for kind, bound in ((2.0, 0.1), (float("inf"), 0.01)):
        expected, found = (
            torch.nn.utils.clip_grad_norm_(net.parameters(), bound, kind, foreach=foreach)
            for net in nets
        )
        assert_global(found, expected)
        for a, b in zip(*(net.parameters() for net in nets), strict=True):
            assert a.grad is not None and b.grad is not None
            assert_global(b.grad, a.grad)
