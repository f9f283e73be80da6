"""Convolutions in place in graphs of torch.compile: one operation, with the eager numbers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from gpudist.exchange.autograd import apply_handwritten
from gpudist.exchange.compiled_nodes import apply_compiled
from gpudist.nn.kernel_choice import as_on_gpu
from gpudist.world.partition import Partition
from tests.nn.affine.conv_cases import DISTRIBUTED
from tests.nn.compare import grid
from tests.nn.in_place import blocks_of_any_size, has_faces
from tests.pool import distributed

CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "moved": ({"dtype": torch.float64}, False),
    "replicated": ({"bias": False, "replicate_parameters": True, "groups": 2}, False),
    "from a copy": ({"replicate_parameters": True}, True),
    "float16": ({"replicate_parameters": True, "dtype": torch.float16}, True),
    "autocast": ({"replicate_parameters": True}, False),
}


@pytest.mark.parametrize("name", sorted(CASES))
@distributed(ranks=3, transports=["host"])
def test_gradients(P_world: Partition, name: str) -> None:
    options, on_gpu = CASES[name]
    P_x = grid(P_world, [1, 1, 3, 1])
    dtype = torch.bfloat16 if name == "autocast" else options.get("dtype", torch.float32)
    torch.manual_seed(0)
    layer = DISTRIBUTED[2](P_x, 2, 4, 3, padding=1, **options)
    torch.manual_seed(P_world.rank or 0)
    x = torch.randn(2, 2, 3, 4, dtype=dtype)
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            nodes.extend(f"{node.target} {node.args}" for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compiled)(graph, inputs)

    torch.compiler.reset()
    results: list[list[torch.Tensor]] = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        block = x.clone().requires_grad_()
        autocast = torch.autocast("cpu", torch.bfloat16) if name == "autocast" else nullcontext()
        with blocks_of_any_size(), as_on_gpu() if on_gpu else nullcontext(), autocast:
            y = run(block)
        learning = [block, *layer.parameters()]
        results.append([y, *torch.autograd.grad(y.float().pow(2).sum(), learning)])
    assert has_faces(layer)
    assert sum("gpudist.by_hand" in node for node in nodes) == 2
    assert not any("convolution" in node for node in nodes)
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
        assert compiled.stride() == eager.stride() or eager is results[0][1]


@distributed(ranks=2, transports=["host"])
def test_gradients_of_gradients_repeat_the_composition(P_world: Partition) -> None:
    """torch.func takes them so in a graph."""
    P_x = grid(P_world, [1, 1, 2])
    torch.manual_seed(0)
    layer = DISTRIBUTED[1](P_x, 2, 2, 3, padding=1, dtype=torch.float64)
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 2, 4).requires_grad_()
    learning = [x, *layer.parameters()]
    results: list[tuple[torch.Tensor, ...]] = []
    with blocks_of_any_size():
        layer(x)
        (bound,) = layer._bindings._results.values()
        for apply in (apply_compiled, apply_handwritten):
            y = apply(bound.in_place, *learning)
            first = torch.autograd.grad(y.pow(3).sum(), learning, create_graph=True)
            squares: Any = sum(part.pow(2).sum() for part in first)
            results.append((*first, *torch.autograd.grad(squares, learning)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
