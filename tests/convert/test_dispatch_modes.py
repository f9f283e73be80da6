"""A converted network trains the same under a dispatch mode, such as torch's counter of FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gpudist
from gpudist import distribute
from gpudist.sbp import Placement, to_global
from gpudist.world.partition import Partition
from tests.convert.networks import UNet3d
from tests.nn.compare import grid, own_block, random_like_all
from tests.pool import distributed
from tests.sbp.parts import B


class Counting(TorchDispatchMode):
    """Counts operations, as profilers do."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 8 * 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc(torch.flatten(x, 1))


CASES: dict[str, tuple[type[nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "U-Net": (UNet3d, (1, 1, 16, 8, 8), (1, 1, 2, 1, 1)),
    "U-Net, samples": (UNet3d, (2, 1, 8, 8, 8), (2, 1, 1, 1, 1)),
    "classifier": (Classifier, (2, 2, 16, 16), (1, 1, 2, 1)),
}


def gradients(
    P_world: Partition, case: str, mode: AbstractContextManager[Any]
) -> list[torch.Tensor]:
    """Return the gradients of the input and of all parameters of a step under a mode."""
    make, shape, partition = CASES[case]
    torch.manual_seed(4)
    net: Any = distribute(make(), grid(P_world, list(partition)))
    x = own_block(random_like_all(shape, 1).float(), net.P_x).requires_grad_()
    with mode:
        y = net(x)
        of_layers = gpudist.nn.DistributedMSELoss(net.P_x)
        loss = of_layers if y.ndim == len(shape) else F.mse_loss
        loss(y, y.detach() + 1).backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("case", CASES)
@distributed(ranks=2)
def test_a_step_has_the_same_gradients(P_world: Partition, case: str) -> None:
    expected = gradients(P_world, case, nullcontext())
    counting, flops = Counting(), FlopCounterMode(display=False)
    for mode in (counting, flops):
        found = gradients(P_world, case, mode)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert counting.operations > 0 and flops.get_total_flops() > 0


@distributed(ranks=2)
def test_a_leaf_made_global_has_its_full_gradient(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    found = []
    for mode in (nullcontext(), Counting()):
        w = torch.arange(1.0, 4.0).requires_grad_()
        with mode:
            y: Any = to_global(w, placement, B) * (2.0 + P_world.plan_rank)
            y.to_local().sum().backward()
        assert w.grad is not None
        found.append(w.grad)
    assert torch.equal(*found)
