"""Column- and row-parallel linear layers are the sequential one, however blocks are distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.errors import PartitionError, PlanMismatch, ShapeError
from gpudist.nn import ColumnParallelLinear, RowParallelLinear
from gpudist.nn.utils import clip_grad_norm_
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.nn.compare import assert_equal_to, gradient_of, random_like_all
from tests.nn.tensor_parallel.parallel_cases import (
    CONVENTIONS,
    F64,
    assert_parameter_gradients,
    block_of,
    cotangent_of_copies,
    drawn_alike,
    gradient_of_copies,
    leaf,
)
from tests.nn.tensor_parallel.parallel_linear_cases import (
    Two,
    check_sequence,
)
from tests.pool import distributed

STEPS = {
    1: [[4], [2]],
    2: [[3, 2], [0, 4], [5, 1], [1, 5]],
    3: [[2, 1, 4], [0, 0, 3], [4, 2, 1]],
    4: [[1, 2, 3, 4], [4, 0, 0, 1]],
}


@pytest.mark.parametrize("dim", [0, 1, -2])
@distributed(ranks=[1, 2, 3, 4], transports=["loopback"])
def test_split_sequence_of_changing_lengths(P_world: Partition, dim: int) -> None:
    for convention in CONVENTIONS:
        check_sequence(P_world, dim, convention, STEPS[P_world.size])


@distributed(ranks=3, transports=["host", "gloo"])
def test_split_sequence_on_other_transports(P_world: Partition) -> None:
    check_sequence(P_world, 1, "dual", STEPS[3])


@distributed(ranks=3, transports=["loopback"])
def test_lengths_agreed_at_every_call(P_world: Partition) -> None:
    balanced = [[2, 2, 1], [1, 1, 1], [3, 2, 2]]
    check_sequence(P_world, 1, "dual", balanced, shape="dynamic")


@distributed(ranks=2, transports=["loopback"])
def test_lengths_are_agreed_once_or_given(
    P_world: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ColumnParallelLinear(P_world, 3, 4, sequence_dim=0)
    assert layer(torch.rand(2 + (P_world.rank or 0), 3)).shape == (5, 2)
    P_world.barrier()

    def refuse(*_: Any) -> None:
        raise AssertionError("a message of the host")

    monkeypatch.setattr(Partition, "allgather_data", refuse)
    assert layer(torch.rand(2 + (P_world.rank or 0), 3)).shape == (5, 2)
    assert layer(torch.rand(6, 3), [6, 6]).shape == (12, 2)
    assert layer(torch.rand(4 - (P_world.rank or 0), 3), 7).shape == (7, 2)


@distributed(ranks=2, transports=["loopback"])
def test_unannounced_lengths_are_refused(P_world: Partition) -> None:
    layer = ColumnParallelLinear(P_world, 3, 4, sequence_dim=0)
    layer(torch.rand(2, 3))
    with pytest.raises(PlanMismatch, match=r"had 2 cells in dim 0 and now has 3.*pass lengths="):
        layer(torch.rand(3, 3))


@distributed(ranks=2, transports=["loopback"])
def test_wrong_lengths_are_refused(P_world: Partition) -> None:
    layer = ColumnParallelLinear(P_world, 3, 4, sequence_dim=0)
    with pytest.raises(ShapeError, match=r"has 2 cells in dim 0, but lengths are \[3, 3\]"):
        layer(torch.rand(2, 3), [3, 3])


@distributed(ranks=2, transports=["loopback"])
def test_other_refusals(P_world: Partition) -> None:
    with pytest.raises(ShapeError, match="convention is 'sum'"):
        ColumnParallelLinear(P_world, 3, 4, convention="sum")  # pyright: ignore
    with pytest.raises(ShapeError, match="shape is 'fixed'; it must be 'static' or 'dynamic'"):
        ColumnParallelLinear(P_world, 3, 4, shape="fixed")  # pyright: ignore
    for axis in (1, -2):
        with pytest.raises(PartitionError, match=f"axis is {axis}; it must be one of the 1"):
            RowParallelLinear(P_world, 4, 4, axis=axis)
    with pytest.raises(ShapeError, match=r"sizes are \[1, 2\], but 4 features on 2 workers"):
        ColumnParallelLinear(P_world, 3, 4, out_sizes=[1, 2])
    with pytest.raises(ShapeError, match="sequence_dim is -1; it must be a dim in front"):
        ColumnParallelLinear(P_world, 3, 4, sequence_dim=-1)(torch.rand(2, 3))
    with pytest.raises(ShapeError, match="has 3 features, not 2"):
        RowParallelLinear(P_world, 4, 4)(torch.rand(2, 3))


@distributed(ranks=2, transports=["host"], timeout_s=120)
def test_a_graph_agrees_on_no_lengths(P_world: Partition) -> None:
    """Lengths would hold for one call only; with or without breaks, all ranks raise."""
    layer = ColumnParallelLinear(P_world, 3, 4, sequence_dim=0, shape="dynamic")
    x = torch.rand(2, 3)
    words = r"ShapeError: .* under torch\.compile pass lengths, or shape='static'"
    for fullgraph in (False, True):
        torch.compiler.reset()
        compiled: Any = torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")
        with pytest.raises(RuntimeError, match=words):
            compiled(x)
        assert torch.equal(compiled(x, 4), layer(x))


@distributed(ranks=4, transports=["loopback"])
def test_copies_for_other_samples(P_world: Partition) -> None:
    """Two copies of the layers, each of two workers, along either axis of a grid."""
    P = P_world.create_cartesian_topology_partition([2, 2])
    assert P.index is not None
    for axis in (0, 1):
        for convention in CONVENTIONS:
            sequential, layer = drawn_alike(
                lambda: Two(torch.nn.Linear(3, 7, dtype=F64), torch.nn.Linear(7, 2, dtype=F64)),
                lambda axis=axis, convention=convention: Two(
                    ColumnParallelLinear(P, 3, 7, dtype=F64, axis=axis, convention=convention),
                    RowParallelLinear(P, 7, 2, dtype=F64, axis=axis, convention=convention),
                ),
            )
            whole, copy = leaf(random_like_all((5, 3), 1)), P.index[1 - axis]
            line = P.along([axis])
            x = leaf(block_of(whole, 0, [3, 2], copy))
            gradient = random_like_all((5, 2), 2)
            sequential(whole).backward(gradient)
            own = block_of(gradient, 0, [3, 2], copy)
            layer(x).backward(cotangent_of_copies(own, convention, line, 9))
            expected = block_of(gradient_of(whole), 0, [3, 2], copy)
            found = gradient_of_copies(x, convention, line)
            assert_equal_to(found, expected, 1e-10, "input gradient")
            assert_parameter_gradients(sequential, layer)
            norm = torch.nn.utils.clip_grad_norm_(sequential.parameters(), 0.5)
            assert_equal_to(clip_grad_norm_(layer, 0.5).to(F64), norm, 1e-10, "norm")


@distributed(ranks=3, transports=["loopback"])
def test_workers_outside(P_world: Partition) -> None:
    P = P_world.create_partition_inclusive([2, 0])
    layers = ColumnParallelLinear(P, 3, 4, dtype=F64), RowParallelLinear(P, 4, 3, dtype=F64)
    x = leaf(random_like_all((2, 3), 0))
    y = layers[1](layers[0](x))
    if not P.active:
        assert torch.equal(y, x) and y is not x
        assert all(p.numel() == 0 for layer in layers for p in layer.parameters())


@distributed(ranks=3, transports=["loopback"])
def test_the_dual_convention_is_the_adjoint(P_world: Partition) -> None:
    assert P_world.rank is not None
    torch.manual_seed(P_world.rank)
    x = torch.randn(4 if P_world.rank else 2, 5, dtype=F64)
    same = torch.randn(4, 5, dtype=F64)
    for layer, given in (
        (ColumnParallelLinear(P_world, 5, 7, False, dtype=F64, convention="dual"), same),
        (
            ColumnParallelLinear(
                P_world, 5, 7, False, dtype=F64, convention="dual", gather_output=True
            ),
            same,
        ),
        (
            ColumnParallelLinear(
                P_world, 5, 7, False, dtype=F64, convention="dual", sequence_dim=0
            ),
            x,
        ),
        (RowParallelLinear(P_world, 15, 4, False, dtype=F64, convention="dual"), same),
        (
            RowParallelLinear(P_world, 15, 4, False, dtype=F64, convention="dual", sequence_dim=0),
            same,
        ),
        (
            RowParallelLinear(
                P_world, 5, 4, False, dtype=F64, convention="dual", input_is_parallel=False
            ),
            same,
        ),
    ):
        assert_adjoint(layer, given, P_world)


@distributed(ranks=2, transports=["loopback"])
def test_double_backward_of_split_sequences(P_world: Partition) -> None:
    assert P_world.rank is not None
    options: dict[str, Any] = {"dtype": F64, "sequence_dim": 0}
    sequential, layer = drawn_alike(
        lambda: Two(torch.nn.Linear(3, 4, dtype=F64), torch.nn.Linear(4, 2, dtype=F64)),
        lambda: Two(
            ColumnParallelLinear(P_world, 3, 4, **options),
            RowParallelLinear(P_world, 4, 2, **options),
        ),
    )
    whole = leaf(random_like_all((4, 3), 1))
    x = leaf(block_of(whole, 0, [2, 2], P_world.rank))
    gradient, direction = random_like_all((4, 2), 2), random_like_all((4, 3), 3)
    (expected,) = torch.autograd.grad(sequential(whole), whole, gradient, create_graph=True)
    own = block_of(gradient, 0, [2, 2], P_world.rank)
    (found,) = torch.autograd.grad(layer(x), x, own, create_graph=True)
    expected.backward(direction)
    found.backward(block_of(direction, 0, [2, 2], P_world.rank))
    expected = block_of(gradient_of(whole), 0, [2, 2], P_world.rank)
    assert_equal_to(gradient_of(x), expected, 1e-10, "gradient of the gradient")
    assert_gradients_or_none(sequential, layer)


def assert_gradients_or_none(sequential: torch.nn.Module, layer: torch.nn.Module) -> None:
    """Assert equal gradients, where a missing gradient counts as zero."""
    for module in (sequential, layer):
        for parameter in module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    assert_parameter_gradients(sequential, layer)


@distributed(ranks=2, transports=["loopback"])
def test_double_backward(P_world: Partition) -> None:
    assert P_world.rank is not None
    for convention in CONVENTIONS:
        sequential, layer = drawn_alike(
            lambda: Two(torch.nn.Linear(3, 4, dtype=F64), torch.nn.Linear(4, 2, dtype=F64)),
            lambda convention=convention: Two(
                ColumnParallelLinear(P_world, 3, 4, dtype=F64, convention=convention),
                RowParallelLinear(P_world, 4, 2, dtype=F64, sequence_dim=0, convention=convention),
            ),
        )
        whole, x = (leaf(random_like_all((4, 3), 1)) for _ in range(2))
        gradient = random_like_all((4, 2), 2)
        (expected,) = torch.autograd.grad(sequential(whole), whole, gradient, create_graph=True)
        own = block_of(gradient, 0, [2, 2], P_world.rank)
        (found,) = torch.autograd.grad(layer(x), x, own, create_graph=True)
        direction = random_like_all((4, 3), 3)
        expected.backward(direction)
        found.backward(direction)
        total = gradient_of_copies(x, convention, P_world)
        assert_equal_to(total, gradient_of(whole), 1e-10, "gradient of the gradient")
        assert_gradients_or_none(sequential, layer)
