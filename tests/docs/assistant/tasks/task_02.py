"""Segment volumes with a soft Dice loss written by hand; split the volume."""

import json

import torch
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

network = nn.Sequential(
    nn.Conv3d(1, 6, 3, padding=1),
    nn.InstanceNorm3d(6, affine=True),
    nn.LeakyReLU(),
    nn.Conv3d(6, 6, 3, padding=2, dilation=2),
    nn.ReLU(),
    nn.Conv3d(6, 1, 1),
)
volume = torch.randn(2, 1, 12, 10, 11)
mask = (torch.rand(2, 1, 12, 10, 11) > 0.7).double()
optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)


def dice_loss(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(scores)
    overlap = (p * mask).sum(dim=(1, 2, 3, 4))
    total = p.sum(dim=(1, 2, 3, 4)) + mask.sum(dim=(1, 2, 3, 4))
    return 1 - (2 * overlap / total).mean()


numbers = []
for _ in range(4):
    optimizer.zero_grad()
    loss = dice_loss(network(volume), mask)
    loss.backward()
    optimizer.step()
    numbers.append(loss.item())
print("NUMBERS", json.dumps(numbers))
