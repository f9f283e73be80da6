"""Modules that a converted network does not import: torch's compiler takes a second and 30 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP = """
import sys, torch, gpudist
from torch import nn
from gpudist.testing import run_distributed

class Twice(nn.Module):
    def forward(self, x):
        y = torch.cat([x[:, :1] * 2, x[:, :1]], 1)
        return y + y.mean((2, 3), keepdim=True) + y.softmax(1) + y.sum(3, keepdim=True)

def body(P):
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2),
        nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4), nn.GELU(), nn.Flatten(2),
        nn.LayerNorm(18), nn.Dropout(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2), nn.LogSoftmax(1),
    )
    network = nn.Sequential(Twice(), network)
    net = gpudist.distribute(network, P.create_cartesian_topology_partition([1, 1, 2, 1]))
    net(torch.randn(1, 2, 5, 16) + P.rank).square().mean().backward()

run_distributed(body, 2, transport="loopback")
print(sorted({"torch._dynamo", "torch.distributed.tensor"} & set(sys.modules)))
"""


def test_compiler_is_not_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEP], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
