"""Neither a converted network nor a function of the table makes torch import its compiler.

It takes a second and 30 MB.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpudist
from gpudist.sbp import Placement
from gpudist.sbp.registry import name_of, signatures
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.sbp.compare import global_of
from tests.sbp.parts import S

ROOT = Path(__file__).resolve().parents[2]
# Of arguments that a function does not take.
RAISES = AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
FEWEST = 400


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x[:, :1] * 2, x[:, :1]], 1)
        return y + y.mean((2, 3), keepdim=True) + y.softmax(1) + y.sum(3, keepdim=True)


def _train(P_world: Partition) -> None:
    network = nn.Sequential(
        Twice(),
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4), nn.GELU(), nn.Flatten(2),
        nn.LayerNorm(18), nn.Dropout(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2), nn.LogSoftmax(1),
    )  # fmt: skip
    net = gpudist.distribute(network, P_world.create_cartesian_topology_partition([1, 1, 2, 1]))
    net(torch.randn(1, 2, 5, 16) + (P_world.rank or 0)).square().mean().backward()


def _call_all(P_world: Partition) -> tuple[int, str]:
    """Return how many functions took some arguments, and the first to import the compiler."""
    placement = Placement("cpu", [0], P_world)
    x = global_of(torch.rand(4, 4), placement, (S(0),))
    images = global_of(torch.rand(2, 4, 4, 4), placement, (S(0),))
    kernel = global_of(torch.rand(4, 4, 3, 3), placement, (S(0),))
    firsts: list[Any] = [(x,), (images,), (images, kernel), ([x, x],)]
    rests: list[Any] = [(), (x,), (1,), (2, 2), (0, 1), (x, x), (x, x, x, 0.1)]
    calls = 0
    for function in signatures:
        for first, rest in product(firsts, rests):
            try:
                function(*first, *rest)
            except RAISES:
                continue
            calls += 1
            break
        if "torch._dynamo" in sys.modules:
            return calls, name_of(function)
    return calls, ""


def main() -> None:
    """Print what training imports, and what :func:`_call_all` returns."""
    warnings.simplefilter("ignore")
    unneeded = {"torch._dynamo", "torch.distributed.tensor"}
    assert not unneeded & sys.modules.keys()
    run_distributed(_train, 2)
    imported = sorted(unneeded & sys.modules.keys())
    print((imported, *run_distributed(_call_all, 1, timeout=100.0)[0]))


def test_compiler_is_not_imported() -> None:
    program = "from tests.sbp.test_unneeded_compiler import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 0, ended.stderr
    imported, calls, importing = ast.literal_eval(ended.stdout)
    assert not imported and not importing and calls > FEWEST
