"""Bodies that run operators and layers as graphs of torch.compile, and eagerly."""

from __future__ import annotations

import torch

from gpudist.world.partition import Partition
from tests.gpu.layers import LAYERS, fill
from tests.gpu.operators import OPERATORS, integers, on_cpu

TURNS = 2


def graph_and_gradients(
    P_world: Partition, case: str, backend: str | None
) -> dict[str, torch.Tensor]:
    """Output and gradients at each of several calls, by one graph; without one if no backend."""
    operator, values = (OPERATORS | LAYERS)[case](P_world)
    assert isinstance(operator, torch.nn.Module)
    rank = P_world.rank or 0
    fill(operator, rank)
    graph = operator
    if backend is not None:
        torch.compiler.reset()
        graph = torch.compile(operator, fullgraph=True, backend=backend)
    results: dict[str, torch.Tensor] = {}
    for turn in range(TURNS):
        x = (values + turn).to(P_world.device).requires_grad_()
        y = graph(x)
        cotangent = integers(y.shape, 100 * turn + rank).to(y.device)
        leaves = {"x": x, **dict(operator.named_parameters())}
        gradients = torch.autograd.grad(y, list(leaves.values()), cotangent)
        results[f"y {turn}"] = y
        for name, gradient in zip(leaves, gradients, strict=True):
            results[f"gradient {turn} of {name}"] = gradient
    return on_cpu(**results)
