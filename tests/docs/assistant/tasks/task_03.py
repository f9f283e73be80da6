"""Regression of images with clipped gradients and a schedule; split height and width."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

network = nn.Sequential(
    nn.ReflectionPad2d(3),
    nn.Conv2d(2, 8, 7),
    nn.GELU(),
    nn.Conv2d(8, 8, 4, 2, 1),
    nn.GELU(),
    nn.ConvTranspose2d(8, 2, 4, 2, 1),
)
images, targets = torch.randn(2, 2, 24, 32), torch.randn(2, 2, 24, 32)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
numbers = []
for _ in range(4):
    optimizer.zero_grad()
    loss = F.mse_loss(network(images), targets)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    numbers += [loss.item(), float(norm)]
print("NUMBERS", json.dumps(numbers))
