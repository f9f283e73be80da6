"""A network that returns a dict of scales (deep supervision)."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)
        self.heads = nn.ModuleDict({"top": nn.Conv2d(4, 2, 1), "low": nn.Conv2d(8, 2, 1)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        top = F.relu(self.stem(x))
        low = F.relu(self.down(top))
        return {"full": self.heads["top"](top), "half": self.heads["low"](low)}


network = Deep()
images, targets = torch.randn(2, 1, 18, 14), torch.randn(2, 2, 18, 14)
optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
numbers = []
for _ in range(3):
    optimizer.zero_grad()
    found = network(images)
    half = F.interpolate(targets, size=(9, 7), mode="bilinear", align_corners=False)
    loss = F.mse_loss(found["full"], targets) + 0.5 * F.mse_loss(found["half"], half)
    loss.backward()
    optimizer.step()
    numbers.append(loss.item())
print("NUMBERS", json.dumps(numbers))
