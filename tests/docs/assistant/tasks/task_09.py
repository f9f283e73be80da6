"""A generator and a critic, trained in turns; split the images."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

generator = nn.Sequential(
    nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()
)
critic = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, 1, 1))
noise, images = torch.randn(2, 4, 6, 6), torch.randn(2, 1, 24, 24)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
numbers = []
for _ in range(3):
    of_critic.zero_grad()
    fake = generator(noise)
    loss = F.softplus(-critic(images)).mean() + F.softplus(critic(fake.detach())).mean()
    loss.backward()
    of_critic.step()
    of_generator.zero_grad()
    wish = F.softplus(-critic(generator(noise))).mean()
    wish.backward()
    of_generator.step()
    numbers += [loss.item(), wish.item()]
print("NUMBERS", json.dumps(numbers))
