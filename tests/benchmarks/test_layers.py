"""The benchmark of the layers finds results right, and wrong ones wrong."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import layers
from gpudist.world.partition import Partition
from tests.pool import distributed


@distributed(ranks=[2, 4], transports=["loopback"])
def test_both_sides_are_right_and_checked(P_world: Partition) -> None:
    cases = layers.cases(P_world.size)
    names = [case.parameters["layer"] for case in cases]
    assert {"Conv2d", "MaxPool2d", "AvgPool2d", "Linear"} <= set(names)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        shape = case.parameters["shape"]
        small = (2, shape[1], 24, 16)[: len(shape)] if len(shape) > 2 else (8, shape[1])
        sides = layers.sides(replace(case, parameters={**case.parameters, "shape": small}), P_world)
        assert list(sides) == ["gpudist", "local torch"]
        for side in sides.values():
            y, *gradients = side.call()
            assert side.is_right((y, *gradients)), case.name
            assert not side.is_right((y + y.abs().max() / 100, *gradients)), case.name
            assert not side.is_right((y, 2 * gradients[0], *gradients[1:])), case.name
