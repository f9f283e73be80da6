"""Operators on GPUs match those on CPUs bit by bit: forward, backward, and repeatedly."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.devices import require_gpu
from tests.gpu.layouts import DTYPES, LAYOUTS, of_layout
from tests.gpu.operators import OPERATORS, carried_out
from tests.gpu.worlds import World, assert_as_on_cpus

require_gpu()


@pytest.mark.parametrize("case", OPERATORS)
def test_cells_and_derivatives(world: World, case: str) -> None:
    assert_as_on_cpus(world, carried_out, case=case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_memory(world: World, layout: str, dtype: torch.dtype) -> None:
    """The results in any memory layout are those of contiguous tensors."""
    reference = {"layout": "contiguous"}
    assert_as_on_cpus(world, of_layout, reference=reference, layout=layout, dtype=dtype)
