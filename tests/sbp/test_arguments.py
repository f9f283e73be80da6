"""Arguments of torch's functions in every order, by every name, as torch and NumPy give them."""

# Spellings that torch takes but does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpudist.sbp import Placement
from gpudist.sbp.arguments import bind_arguments
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, global_of
from tests.sbp.parts import S, random


@distributed(ranks=2, transports=("loopback",))
def test_tensors_named_in_another_order(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    xs = [random((4, 4)), random((4, 4), 1), random((4, 4), 2).abs() + 1]
    x, y, z = (global_of(t, placement, (S(0),)) for t in xs)
    assert_global(torch.addcdiv(x, tensor2=z, tensor1=y), torch.addcdiv(*xs))
    named = torch.addcdiv(tensor2=z, value=2, input=x, tensor1=y)
    assert_global(named, torch.addcdiv(*xs, value=2))
    assert_global(F.linear(weight=y, input=x), F.linear(*xs[:2]))
    assert_global(torch.cat(dim=1, tensors=[y, x]), torch.cat([xs[1], xs[0]], 1))
    assert_global(
        torch.where(other=x, input=y, condition=z > 1.5), torch.where(xs[2] > 1.5, xs[1], xs[0])
    )


@distributed(ranks=2, transports=("loopback",))
def test_names_and_numbers_of_numpy(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    whole = random((4, 6))
    x = global_of(whole, placement, (S(0),))
    assert_global(torch.sum(x, axis=0, keepdims=True), whole.sum(0, True))
    assert_global(torch.cat((x, x), axis=1), torch.cat((whole, whole), 1))
    assert_global(
        x.sum(np.int64(0)).view(np.int64(2), -1) * np.float32(2), whole.sum(0).view(2, 3) * 2
    )


X, Y = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (torch.lerp, (X,), {"weight": 0.5, "end": Y}, ((X,), {"weight": 0.5, "end": Y})),
        (torch.lerp, (), {"weight": 0.5, "end": Y, "input": X}, ((X, Y), {"weight": 0.5})),
        (torch.lerp, (X,), {"weight": X, "end": Y}, ((X, Y, X), {})),
        (torch.add, (X, Y), {"out": X}, ((X, Y), {"out": X})),
        (torch.add, (X, Y), {"no such": X}, ((X, Y), {"no such": X})),
        (F.pad, (), {"pad": [1, 1], "input": X}, ((X,), {"pad": [1, 1]})),
        (torch.relu, (np.float64(1.0),), {}, ((1.0,), {})),
    ],
)
def test_settled(function: Any, args: Any, kwargs: Any, expected: Any) -> None:
    found = bind_arguments(function, args, kwargs)
    assert str(found) == str(expected) and type(found[0][0]) is type(expected[0][0])


@distributed(ranks=2, transports=("loopback",))
def test_positions_are_refused_outside_a_network(P_world: Partition) -> None:
    x = global_of(random((4,)), Placement("cpu", [0, 1], P_world), (S(0),))
    with pytest.raises(NotImplementedError, match="condition alone"):
        torch.where(x > 0)
