"""Forward and backward of networks with both placements of parameters, fused or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from benchmarks.case import Case, Side
from benchmarks.halo import grid_of
from benchmarks.layers import are_close, block_of, both_ways, in_double
from gpudist import nn
from gpudist.world.partition import CartesianPartition, Partition

# The others are compared with "gpudist".
SIDES: dict[str, tuple[bool, bool]] = {
    "gpudist": (False, True),
    "one owner, each layer": (False, False),
    "replicated, fused": (True, True),
    "replicated, each layer": (True, False),
}
Layer = tuple[str, tuple[Any, ...], dict[str, Any]]


def _conv(inputs: int, outputs: int, stride: int = 1) -> list[Layer]:
    options = {"stride": stride, "padding": 1, "bias": False}
    return [
        ("Conv2d", (inputs, outputs, 3), options),
        ("BatchNorm2d", (outputs,), {}),
        ("SiLU", (), {}),
    ]


def _up(inputs: int, outputs: int) -> list[Layer]:
    return [("ConvTranspose2d", (inputs, outputs, 2), {"stride": 2}), *_conv(outputs, outputs)]


@dataclass(frozen=True)
class Network:
    """Layers by torch's names, and the global shape of their input."""

    layers: list[Layer]
    shape: tuple[int, ...]

    def grid(self, ranks: int) -> tuple[int, ...]:
        """Return the grid: images are cut along spatial dims, rows among the ranks."""
        return grid_of(ranks, 4) if len(self.shape) == 4 else (ranks, 1)

    def sequential(self) -> torch.nn.Sequential:
        return self._made(lambda name: getattr(torch.nn, name), {})

    def distributed(
        self, P_x: CartesianPartition, replicate_parameters: bool, fused: bool
    ) -> torch.nn.Module:
        def distributed(name: str) -> Callable[..., torch.nn.Module]:
            return lambda *given, **options: getattr(nn, f"Distributed{name}")(
                P_x, *given, **options
            )

        options = {"replicate_parameters": replicate_parameters}
        made = self._made(distributed, options)
        return nn.fuse_parameter_movements(made) if fused else made

    def _made(
        self, maker: Callable[[str], Callable[..., torch.nn.Module]], placing: dict[str, Any]
    ) -> torch.nn.Sequential:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for name, given, options in self.layers:
            if name == "SiLU":
                layers.append(torch.nn.SiLU())
            else:
                of_parameters = {} if name == "AvgPool2d" else placing
                layers.append(maker(name)(*given, **options, **of_parameters))
        return torch.nn.Sequential(*layers)


NETWORKS = {
    "small convnet": Network(
        [*_conv(3, 16), *_conv(16, 32, 2), *_conv(32, 32), *_conv(32, 64, 2), *_conv(64, 64)],
        (8, 3, 64, 64),
    ),
    "large linear": Network(
        [("Linear", (2048, 2048), {}), ("SiLU", (), {}), ("Linear", (2048, 2048), {})],
        (64, 2048),
    ),
    "U-Net-like stack": Network(
        [
            *(*_conv(4, 16), ("AvgPool2d", (2,), {})),
            *(*_conv(16, 32), ("AvgPool2d", (2,), {})),
            *(*_conv(32, 64), *_up(64, 32), *_up(32, 16)),
            ("Conv2d", (16, 4, 1), {}),
        ],
        (2, 4, 128, 128),
    ),
}


def cases(ranks: int) -> list[Case]:
    """Return the cases. Bytes are the size of all parameters; shapes are global."""
    found: list[Case] = []
    for name, network in NETWORKS.items():
        nbytes = sum(parameter.nbytes for parameter in network.sequential().parameters())
        shape, grid = (",".join(map(str, n)) for n in (network.shape, network.grid(ranks)))
        words = f"{name}, global [{shape}] on [{grid}]"
        block = prod(network.shape) * 4 // ranks
        found.append(Case("parameters", words, ranks, nbytes, {"network": name}, block))
    return found


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the output and the gradients of input and parameters."""
    network = NETWORKS[case.parameters["network"]]
    shape = case.parameters.get("shape", network.shape)
    P_x = P_world.create_cartesian_topology_partition(network.grid(P_world.size))
    sequential = network.sequential()
    x = torch.rand(shape) - 0.5
    gy = torch.rand(sequential(x).shape) - 0.5
    y, gx, *parameters = in_double(sequential, x, gy)
    expected = (block_of(y, P_x), block_of(gx, P_x), *parameters)
    x, gy = block_of(x, P_x), block_of(gy, P_x)

    def side(replicate_parameters: bool, fused: bool) -> Side:
        module = network.distributed(P_x, replicate_parameters, fused)
        return Side(lambda: both_ways(module, x, gy), lambda results: are_close(results, expected))

    return {name: side(*how) for name, how in SIDES.items()}
