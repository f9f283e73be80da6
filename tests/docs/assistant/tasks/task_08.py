"""Save network and optimizer after two steps, load them into new objects, and continue."""

import io
import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv3d(4, 1, 3, padding=1)
    )
    return network, torch.optim.AdamW(network.parameters(), lr=1e-2)


volume, target = torch.randn(1, 1, 8, 8, 8), torch.randn(1, 1, 8, 8, 8)
network, optimizer = make()


def step() -> float:
    optimizer.zero_grad()
    loss = F.mse_loss(network(volume), target)
    loss.backward()
    optimizer.step()
    return loss.item()


numbers = [step(), step()]
kept = io.BytesIO()
torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, kept)
kept.seek(0)
network, optimizer = make()
state = torch.load(kept)
network.load_state_dict(state["network"])
optimizer.load_state_dict(state["optimizer"])
numbers += [step(), step()]
print("NUMBERS", json.dumps(numbers))
