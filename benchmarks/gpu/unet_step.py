"""A training step of a 3-D U-Net on one GPU: torch's network, and the one converted from it.

``eager`` and ``graph`` wait for the GPU after each step; ``host`` does not. bf16 is autocast. The
converted network runs in a world of one: only the host's time and the layers' kernels may differ.
"""

from __future__ import annotations

import contextlib
from copy import deepcopy

import torch
from torch import nn

import gpudist
from benchmarks.case import Side
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from examples.networks import UNet3d
from gpudist.nn import DistributedCrossEntropyLoss
from gpudist.world.partition import Partition

CLASSES, WIDTH, TINY_WIDTH = 3, 16, 4
# Four levels of a smaller one have extents of 2, which torch convolves wrongly in bfloat16 on CPUs.
SIDES, TINY = (32, 64, 128), (32,)
LAYOUTS = {
    "contiguous": torch.contiguous_format,
    "channels last": torch.channels_last_3d,
}
PRECISIONS = ("fp32", "bf16")
# Most errors of losses and gradients, in Euclidean norm, relative to those of torch's own network.
# Both are compared with float64. Products of fp32 are rounded to tf32, and a rounding that changes
# the sign of a cell before a ReLU changes gradients by percents.
MOST_ERRORS, LEAST_ERROR = 3.0, 1e-4
LR = 0.01


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are left out, since arithmetic dominates."""
    found: list[GpuCase] = []
    both = (("fp32", "contiguous", "eager"), ("bf16", "channels last", "graph"))
    for side in TINY if tiny else SIDES:
        for precision in PRECISIONS:
            for layout in LAYOUTS:
                for how in ("eager", "graph", "host"):
                    if how == "host" and side != SIDES[0]:
                        continue
                    if tiny and (precision, layout, how) not in both:
                        continue
                    parameters = {
                        "side": side, "precision": precision, "layout": layout, "how": how,
                        "width": TINY_WIDTH if tiny else WIDTH,
                    }  # fmt: skip
                    name = f"{side}^3, {precision}, {layout}, {how}"
                    clock = "enqueue" if how == "host" else "step"
                    found.append(GpuCase("unet_step", name, ranks, 0, parameters, clock=clock))
    return found


class _Training:
    """Training of a network on one batch, without a read of the loss, which a graph cannot have."""

    def __init__(
        self, network: nn.Module, criterion: nn.Module, x: torch.Tensor, target: torch.Tensor,
        precision: str,
    ) -> None:  # fmt: skip
        self._network, self._criterion, self._x, self._target = network, criterion, x, target
        self._is_cast = precision == "bf16"
        self._optimizer = torch.optim.SGD(network.parameters(), lr=LR)
        self._initial = [p.detach().clone() for p in network.parameters()]

    @torch.enable_grad()
    def step(self) -> list[torch.Tensor]:
        """Return the gradients and the loss."""
        self._optimizer.zero_grad(set_to_none=True)
        cast = torch.autocast(self._x.device.type, torch.bfloat16)
        with cast if self._is_cast else contextlib.nullcontext():
            loss = self._criterion(self._network(self._x), self._target)
        loss.backward()
        self._optimizer.step()
        gradients = [p.grad for p in self._network.parameters() if p.grad is not None]
        return [*gradients, loss.detach()]

    @torch.no_grad()
    def start_again(self) -> None:
        """Restore the initial weights."""
        for weight, initial in zip(self._network.parameters(), self._initial, strict=True):
            weight.copy_(initial)


def _first_step_of(
    network: nn.Module, x: torch.Tensor, target: torch.Tensor, precision: str
) -> list[torch.Tensor]:
    return _Training(deepcopy(network), nn.CrossEntropyLoss(), x, target, precision).step()


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    side, how, precision = (case.parameters[name] for name in ("side", "how", "precision"))
    layout = LAYOUTS[case.parameters["layout"]]
    torch.manual_seed(0)
    network = UNet3d(1, CLASSES, case.parameters["width"])
    network = network.to(P_world.device).to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    x = torch.randn(1, 1, side, side, side).to(P_world.device, memory_format=layout)
    target = torch.randint(CLASSES, (1, side, side, side)).to(P_world.device)
    P_x = P_world.create_cartesian_topology_partition([1] * 5)
    ours = gpudist.distribute(deepcopy(network), P_x), DistributedCrossEntropyLoss(P_x)
    exact = _first_step_of(network.double(), x.double(), target, "fp32")
    network = network.float()
    bounds = [
        MOST_ERRORS * (a - b).norm() + LEAST_ERROR * b.norm()
        for a, b in zip(_first_step_of(network, x, target, precision), exact, strict=True)
    ]

    def is_right(found: list[torch.Tensor]) -> bool:
        return len(found) == len(exact) and all(
            bool((a - b).norm() <= bound) for a, b, bound in zip(found, exact, bounds, strict=True)
        )

    def side_of(network: nn.Module, criterion: nn.Module) -> Side:
        training = _Training(network, criterion, x, target, precision)
        call = machine.capture(training.step) if how == "graph" else training.step
        return Side(call, is_right, training.start_again)

    return {"gpudist": side_of(*ours), "torch": side_of(network, nn.CrossEntropyLoss())}
