"""Every function of ``torch.fft`` over split dims, on torch's own samples; their adjoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpudist.sbp import Placement, explain, to_global
from gpudist.sbp.registry import signatures
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_matches
from tests.sbp.parts import P, S, random
from tests.sbp.samples import operators, samples_of
from tests.sbp.tables import assert_table

# They take no tensor, so there is nothing to split.
WITHOUT_TENSORS = {"fftfreq", "rfftfreq"}
NAMES = {name for name in dir(torch.fft) if "fft" in name and not name.startswith("_")}
TRANSFORMS = sorted(NAMES - WITHOUT_TENSORS)
SAMPLES = 60


def test_every_function_has_an_entry() -> None:
    assert len(TRANSFORMS) == 20
    assert all(getattr(torch.fft, name) in signatures for name in TRANSFORMS)
    with_samples = {op.name.removeprefix("fft.") for op in operators() if "fft." in op.name}
    assert with_samples >= set(TRANSFORMS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMS)
@distributed(ranks=3, transports=("loopback",))
def test_samples(P_world: Partition, name: str) -> None:
    """Values and gradients, with each dim split in turn, and with two of them split."""
    line = Placement("cpu", [0, 1, 2], P_world)
    op = next(one for one in operators() if one.name == f"fft.{name}")
    _, samples = samples_of(op, SAMPLES)
    count = 0
    for sample in samples:
        x, args, kwargs = sample.input.detach(), sample.args, sample.kwargs

        def function(
            x: torch.Tensor, args: tuple[Any, ...] = args, kwargs: dict[str, Any] = kwargs
        ) -> torch.Tensor:
            return op.op(x, *args, **kwargs)

        try:
            with warnings.catch_warnings():
                function(x)
        except RuntimeError:
            continue
        for d in range(x.dim()):
            assert_matches(function, [x], line, [(S(d),)])
            count += 1
    assert count >= 4


OPTIONS: list[dict[str, Any]] = [
    {"norm": "backward"}, {"norm": "ortho"}, {"norm": "forward"},
    {"size": -2}, {"size": 3}, {"dim": 0},
]  # fmt: skip


def call_of(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> Callable[..., Any]:
    """Return the transform with one option, in its own words."""
    function = getattr(torch.fft, name)
    if "shift" in name:
        return lambda x: function(x, dim=options.get("dim", (1, 2)))
    given: dict[str, Any] = {"norm": options["norm"]} if "norm" in options else {}
    has_one = not name.endswith(("2", "n"))
    if "size" in options:
        sizes = [n + options["size"] for n in shape[-2:]]
        given |= {"n": sizes[-1]} if has_one else {"s": sizes, "dim": (-2, -1)}
    if "dim" in options:
        given["dim"] = 0 if has_one else (2, 0)
    return lambda x: function(x, **given)


def input_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a complex input, or a real one for the transforms of real numbers."""
    if name.startswith(("rfft", "ihfft")):
        return random(shape)
    return torch.complex(random(shape, 1), random(shape, 2))


@pytest.mark.parametrize("name", TRANSFORMS)
@distributed(ranks=4, transports=("loopback",))
def test_dot(P_world: Partition, name: str) -> None:
    """Backward is the adjoint, with all transformed dims split and with every option."""
    shape = (4, 7, 6)
    x = input_of(name, shape)
    for options in OPTIONS:
        function = call_of(name, options, shape)
        for ranks, sbp in (([0, 1, 2, 3], (S(2),)), ([[0, 1], [2, 3]], (S(1), S(2)))):
            placement = Placement("cpu", ranks, P_world)
            assert placement.index is not None
            block = x[placement.layout(sbp, shape).box(placement.index).slices]

            def transform(
                block: torch.Tensor, placement: Any = placement, sbp: Any = sbp, f: Any = function
            ) -> torch.Tensor:
                return f(to_global(block, placement, sbp)).to_local()

            assert_adjoint(transform, block.contiguous(), P_world)


@distributed(ranks=8, transports=("loopback",))
def test_without_boxing(P_world: Partition) -> None:
    """Dims that are not transformed stay split, and terms stay terms: all transforms are linear."""
    x = random((6, 4, 7))
    rows = [([S(0)], S(0)), ([S(1)], S(1)), ([P], P)]
    for name in ("fft", "rfft", "ihfft"):
        assert_table(P_world, getattr(torch.fft, name), [x], rows)
    rows = [([S(0)], S(0)), ([P], P)]
    for name in ("fft2", "rfft2", "ihfft2"):
        assert_table(P_world, getattr(torch.fft, name), [x], rows)
    assert_table(P_world, lambda t: torch.fft.rfftn(t, dim=(0, 2)), [x], [([S(1)], S(1)), ([P], P)])


@distributed(ranks=4, transports=("loopback",))
def test_workers_share_the_work(P_world: Partition) -> None:
    """The dim to split instead is one with cells for every worker, if there is one."""
    placement = Placement("cpu", range(4), P_world)
    rank = P_world.rank or 0
    x = to_global(random((1, 8, 4, 6))[:, :, rank : rank + 1], placement, S(2))
    with explain() as lines:
        y = torch.fft.rfft2(x)
    assert y.sbp == (S(1),), lines
