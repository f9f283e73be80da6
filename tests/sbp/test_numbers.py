"""Numbers given as tensors without dims, which torch takes wherever it takes numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import gpudist
from gpudist.sbp import Placement, broadcast, split
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import global_of

T = torch.Tensor
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "roll": lambda x, k, e: x.roll(k, 2),
    "pad": lambda x, k, e: F.pad(x, (0, 0, k, 0)),
    "pad value": lambda x, k, e: F.pad(x, (1, 1, 1, 1), value=e),
    "repeat": lambda x, k, e: x.repeat(1, k, 1, 1),
    "topk": lambda x, k, e: x.topk(k, 1)[0],
    "sum": lambda x, k, e: x.sum(k),
    "softmax": lambda x, k, e: x.softmax(k),
    "transpose": lambda x, k, e: x.transpose(k, 3),
    "narrow": lambda x, k, e: x.narrow(1, k - 1, 2),
    "layer norm": lambda x, k, e: F.layer_norm(x, x.shape[1:], eps=e),
    "group norm": lambda x, k, e: F.group_norm(x, 1, eps=e),
    "batch norm": lambda x, k, e: F.batch_norm(x, None, None, training=True, eps=e),
    "huber loss": lambda x, k, e: F.huber_loss(x, x * 0, delta=e),
    "norm": lambda x, k, e: x.norm(p=e, dim=2),
    "pool": lambda x, k, e: F.avg_pool2d(x, k),
    "logsumexp": lambda x, k, e: x.logsumexp(k),
    "stack": lambda x, k, e: torch.stack([x, x], k),
    "slice": lambda x, k, e: x[:, :, k:],
    "sum with alpha": lambda x, k, e: torch.add(x, x, alpha=k),
}


class Called(torch.nn.Module):
    k: T
    e: T

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("k", torch.tensor(1))
        self.register_buffer("e", torch.tensor(0.5))

    def forward(self, x: T) -> T:
        self.k += 1
        return CALLS[self.name](x, self.k, self.e)


@distributed(ranks=2, transports=["loopback"])
def test_numbers_that_change(P_world: Partition) -> None:
    """Calls equal torch's for plain and global numbers, which differ from call to call."""
    placement, P_x = Placement("cpu", [0, 1], P_world), P_world.grid(1, 1, 2, 1)
    whole = torch.linspace(-1, 2, 2 * 4 * 6 * 4).reshape(2, 4, 6, 4).sin()
    for name, call in CALLS.items():
        alone = Called(name)
        network: Any = gpudist.distribute(Called(name), P_x, inputs={"x": "split"})
        x = global_of(whole, placement, (split(2),))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(2):
                torch.testing.assert_close(
                    network(whole).full_tensor(), alone(whole), msg=f"{name}, call {step}"
                )
            for k in (1, 2):
                expected = call(whole, torch.tensor(k), torch.tensor(0.5))
                numbers = [torch.tensor(k), torch.tensor(0.5)]
                for given in (numbers, [global_of(n, placement, (broadcast,)) for n in numbers]):
                    found = call(x, *given).full_tensor()
                    torch.testing.assert_close(found, expected, msg=f"{name} by {k}")
