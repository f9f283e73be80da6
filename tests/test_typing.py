"""A checker of types finds the typos of a user's script, and nothing in a correct one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("pyright", reason="pyright is not installed: make types")

RIGHT = """
import torch
from torch import nn

import gpudist
from gpudist import sbp
from gpudist.convert import Converted


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x).mean((2, 3))


P_world = gpudist.init(timeout=60)
P_x = P_world.grid(1, 1, 2, 2)
net = gpudist.distribute(Net(), P_x, methods=("forward", "encode"), unknown="refuse")
width: int = net.first.out_channels
code: torch.Tensor = net.encode(torch.ones(1, 1, 8, 8))
assert isinstance(net, Converted)
criterion = gpudist.nn.DistributedCrossEntropyLoss(net.P_x, ignore_index=2)
conv = gpudist.nn.DistributedConv2d(P_x, 1, 2, 3, padding=1, bias=False)
kernel: tuple[int, ...] = conv.kernel_size
image = torch.ones(1, 1, 8, 8) if P_x.rank == 0 else None
x = gpudist.scatter(image, P_x)
y = gpudist.halo_exchange(x, P_x, halo=[(1, 1)])
z = gpudist.to_global(y, sbp.Placement.of(P_x), sbp.split(0))
z.full_tensor().sum().backward()
optimizer = torch.optim.SGD(net.parameters(), 0.1)


def train(image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = criterion(net(image), target)
    loss.backward()
    optimizer.step()
    return loss


step = gpudist.capture(train)
print(step(x, x).item(), gpudist.stats(), conv)
plain = gpudist.sequential(net)
if plain is not None:
    torch.save(plain.first.state_dict(), "net.pt")
dataset = gpudist.data.block_of([torch.ones(1, 8, 8)], P_x)
loader = torch.utils.data.DataLoader(dataset, batch_size=1)
gpudist.checkpoint.save(net, "folder", optimizer)
try:
    gpudist.broadcast(x, P_x, P_x)
except (gpudist.ShapeError, gpudist.errors.PeerFailure):
    raise
"""
# Each line with a comment has one mistake.
TYPOS = """
import torch
from torch import nn

import gpudist


class Net(nn.Module):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x


P_world = gpudist.init()
P_x = P_world.grid(1, 1, 2, 2)
net = gpudist.distribute(Net(), P_x)
gpudist.init(timeot=60)  # 1
P_world.gird(1, 1, 2, 2)  # 2
gpudist.distribute(Net(), P_x, unknown="refus")  # 3
gpudist.distribute(P_x, Net())  # 4
net.encode(torch.ones(1), 2)  # 5
gpudist.nn.DistributedConv2d(P_x, 1, 2, 3, paddin=1)  # 6
gpudist.nn.DistributedCrossEntropyLoss(P_x, ignore_indx=2)  # 7
gpudist.halo_exchange(torch.ones(1, 1, 8, 8), P_x, halo=1)  # 8
gpudist.all_reduce(torch.ones(1), P_x)  # 9
gpudist.sequential(net, rot=0)  # 10
"""


def test_typos_are_found_and_nothing_else(tmp_path: Path) -> None:
    """Takes 5 s of CPU, most of them for torch."""
    (tmp_path / "right.py").write_text(RIGHT, encoding="utf-8")
    (tmp_path / "typos.py").write_text(TYPOS, encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    ended = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable,
         "--project", str(tmp_path)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(ended.stdout)["generalDiagnostics"]
    right = [one["message"] for one in found if one["file"].endswith("right.py")]
    assert right == []
    lines = TYPOS.splitlines()
    at = {one["range"]["start"]["line"] for one in found if one["severity"] == "error"}
    numbers = {re.sub(r".*# ", "", lines[line]) for line in at}
    assert numbers == {str(number) for number in range(1, 11)}
