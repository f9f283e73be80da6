"""Two inputs: an image that is split, and a vector of conditions that is not."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Film(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.condition = nn.Linear(4, 16)

    def forward(self, image: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.condition(condition).chunk(2, dim=1)
        x = F.silu(self.a(image)) * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        return self.b(x)


network = Film()
images, conditions, targets = (
    torch.randn(3, 1, 16, 16),
    torch.randn(3, 4),
    torch.randn(3, 1, 16, 16),
)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
numbers = []
for _ in range(4):
    optimizer.zero_grad()
    loss = F.l1_loss(network(images, conditions), targets)
    loss.backward()
    optimizer.step()
    numbers.append(loss.item())
print("NUMBERS", json.dumps(numbers))
