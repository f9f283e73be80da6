"""CuPy's arrays on GPUs: the cells of NumPy's on CPUs, whichever library's stream is late."""

from __future__ import annotations

import pytest

from tests.gpu.arrays import in_stream_order
from tests.gpu.devices import ON_DOUBLES, require_gpu
from tests.gpu.worlds import World, assert_as_on_cpus

require_gpu()
if not ON_DOUBLES:
    pytest.importorskip("cupy")


@pytest.mark.parametrize("late", ["CuPy", "torch", "neither"])
def test_stream_order(world: World, late: str) -> None:
    assert_as_on_cpus(world, in_stream_order, late=late)
