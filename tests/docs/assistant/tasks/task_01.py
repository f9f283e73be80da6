"""Train a small residual classifier with batch normalization; split the images."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(),
            nn.Conv2d(b, b, 3, 1, 1, bias=False),
            nn.BatchNorm2d(b),
        )
        self.skip = nn.Conv2d(a, b, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.a(x) + self.skip(x))


network = nn.Sequential(
    Block(3, 8, 1), Block(8, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
)
images, labels = torch.randn(6, 3, 20, 18), torch.randint(5, (6,))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
numbers = []
for _ in range(4):
    optimizer.zero_grad()
    loss = F.cross_entropy(network(images), labels)
    loss.backward()
    optimizer.step()
    numbers.append(loss.item())
print("NUMBERS", json.dumps(numbers))
