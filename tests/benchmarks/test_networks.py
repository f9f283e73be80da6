"""The benchmark of whole networks finds results right, and wrong ones wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import networks
from gpudist.world.partition import Partition
from tests.pool import distributed

SMALL = {"U-Net 64^3": (1, 1, 16, 16, 16), "ResNet-18 256^2": (2, 3, 64, 64)}


@distributed(ranks=[2], transports=["loopback"])
@pytest.mark.parametrize("name", SMALL)
def test_both_sides_are_right_and_checked(P_world: Partition, name: str) -> None:
    cases = {case.parameters["network"]: case for case in networks.cases(P_world.size)}
    assert set(cases) > set(SMALL)
    case = cases[name]
    small = replace(case, parameters={**case.parameters, "shape": SMALL[name]})
    sides = networks.sides(small, P_world)
    assert list(sides) == ["gpudist", "sequential"]
    for side in sides.values():
        result = side.call()
        assert side.is_right(result)
        if result is None:
            assert P_world.rank == 1
            continue
        assert not side.is_right(replace(result, loss=1.02 * result.loss))
        doubled = {n: 2 * gradient for n, gradient in result.gradients.items()}
        empty = all(gradient.numel() == 0 for gradient in doubled.values())
        assert side.is_right(replace(result, gradients=doubled)) == empty
        assert side.call().loss != result.loss
        side.clear()
        assert side.is_right(side.call())
