"""Saliency: the gradient of the loss with respect to the image, and its norm per image."""

import json

import torch
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

network = nn.Sequential(
    nn.Conv2d(3, 8, 5, padding=2, padding_mode="circular"),
    nn.Softplus(),
    nn.AvgPool2d(3, 2),
    nn.Conv2d(8, 1, 3),
)
images = torch.randn(3, 3, 21, 23, requires_grad=True)
y = network(images)
(gradient,) = torch.autograd.grad(y.square().mean(), images)
numbers = [y.sum().item(), *gradient.flatten(1).norm(dim=1).tolist(), gradient.abs().max().item()]
print("NUMBERS", json.dumps(numbers))
