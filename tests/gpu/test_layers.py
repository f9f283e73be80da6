"""Layers on GPUs compute the same as on CPUs, up to the rounding of torch's own kernels."""

from __future__ import annotations

import pytest

from tests.gpu.devices import require_gpu
from tests.gpu.layers import LAYERS, layer_and_gradients, trained
from tests.gpu.worlds import World, assert_as_on_cpus

require_gpu()


@pytest.mark.parametrize("case", LAYERS)
def test_output_and_gradients(world: World, case: str) -> None:
    assert_as_on_cpus(world, layer_and_gradients, tolerance=1e-12, case=case)


@pytest.mark.parametrize("as_a_graph", [False, True], ids=["eager", "graph"])
def test_training(world: World, as_a_graph: bool) -> None:
    assert_as_on_cpus(world, trained, tolerance=1e-10, steps=5, as_a_graph=as_a_graph)
