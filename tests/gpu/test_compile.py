"""One graph of torch.compile without a break gives the eager numbers."""

from __future__ import annotations

import pytest

from tests.gpu.devices import require_gpu
from tests.gpu.graphs import graph_and_gradients
from tests.gpu.worlds import OneRank, World, assert_as_on_cpus

require_gpu()

OPERATORS = ("halo", "halo, periodic", "broadcast from the last")
LAYERS = ("conv2d", "conv2d, of a large block", "conv3d, circular")
TOLERANCE = 1e-12
WITHOUT = {"backend": None}
every_case = pytest.mark.parametrize("case", OPERATORS + LAYERS)


def tolerance(case: str) -> float:
    return TOLERANCE if case in LAYERS else 0.0


@every_case
def test_traced(world: World, case: str) -> None:
    assert_as_on_cpus(
        world, graph_and_gradients, tolerance(case), WITHOUT, case=case, backend="aot_eager"
    )


# torch's own, where its compiler is first used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@every_case
def test_compiled(one_rank: OneRank, case: str) -> None:
    """Needs what torch's own compiler does: Triton and, for CPUs, a C++ compiler."""
    assert_as_on_cpus(
        one_rank, graph_and_gradients, tolerance(case), WITHOUT, case=case, backend="inductor"
    )
