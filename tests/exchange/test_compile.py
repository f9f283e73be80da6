"""Compiled graphs of operators: the eager numbers, in the program's order on every rank."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportOperatorIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import gpudist
from gpudist import ops
from gpudist.errors import PlanMismatch
from gpudist.exchange.torch_library import adjoint_of, handle_of
from gpudist.ops.bind_cache import BindCache
from gpudist.world.partition import Partition
from tests.ops.dense import cells, operations, partition_of, random
from tests.pool import distributed

Function = Callable[..., torch.Tensor]


def compiled(function: Function, backend: str = "aot_eager", **options: Any) -> Function:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def gradients(function: Function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradient of the sum of its squares for every input."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    y = function(*leaves)
    y.pow(2).sum().backward()
    return [y.detach(), *[x.grad for x in leaves if x.grad is not None]]


def assert_equal_to_eager(compiled: Function, eager: Function, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(gradients(compiled, *inputs), gradients(eager, *inputs))


def placeholder(batch: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.empty(batch, 0, dtype=dtype, requires_grad=True)


def functional_chain(P_world: Partition) -> Function:
    """Every function, one after the other; ranks 0 and 1 hold the input."""
    P_x, P_all = partition_of(P_world, [0, 1], [1, 2]), partition_of(P_world, range(3), [1, 3])
    P_y, P_1 = partition_of(P_world, [1, 2], [2, 1]), P_world.create_partition_inclusive([1])
    P_0 = P_world.create_partition_inclusive([0])

    def chain(x: torch.Tensor) -> torch.Tensor:
        x = gpudist.halo_exchange(x, P_x, [gpudist.SlidingWindow(3, padding=(1, 1))])
        x = gpudist.halo_exchange(x.sin(), P_x, halo=((-1, -1),), periodic=True, nested=True)
        x = gpudist.repartition(x, P_x, P_y)
        x = gpudist.scatter(gpudist.repartition(x, P_y, P_x), P_x)
        x = gpudist.gather(x.cos(), P_x)
        x = gpudist.repartition(x, partition_of_rank_0, P_all)
        x = gpudist.all_sum_reduce(gpudist.all_gather(x, P_all, [1]), P_all, [1])
        x = gpudist.sum_scatter(x, P_all, axes_keep=[0])
        x = gpudist.broadcast(gpudist.sum_reduce(x[:, :1], P_world, P_1), P_1, P_world)
        x = gpudist.send_recv(x.exp() if P_1.active else x[:0], P_1, P_0)
        return ops.move(*ops.add(x, ops.copy(x, x)[0]))[1]

    partition_of_rank_0 = partition_of(P_world, [0], [1, 1])
    return chain


def modules_chain(P_world: Partition) -> Function:
    P_x, P_all = partition_of(P_world, [0, 1], [1, 2]), partition_of(P_world, range(3), [1, 3])
    P_1 = P_world.create_partition_inclusive([1])
    return torch.nn.Sequential(
        ops.HaloExchange(P_x, halo=((1, 1),), padding_value=7.0),
        torch.nn.Tanh(),
        ops.Gather(P_x, root=1, shape="static"),
        ops.Broadcast(P_1, P_world),
        ops.AllSumReduce(P_all, [1]),
        ops.SumScatter(P_all, [1]),
        ops.AllGather(P_all, [1]),
        ops.SumReduce(P_world, P_1),
        ops.SendRecv(P_1, P_world.create_partition_inclusive([0])),
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("make", [functional_chain, modules_chain])
@distributed(ranks=3, transports=["host"])
def test_every_operator(P_world: Partition, make: Callable[..., Function], dynamic: Any) -> None:
    function = make(P_world)
    graph = compiled(function, dynamic=dynamic)
    x = random((4, 6), 1)[:, :3].requires_grad_() if P_world.rank < 2 else placeholder(4)
    for _ in range(2):
        assert_equal_to_eager(graph, function, x)


@distributed(ranks=3, transports=["gloo"])
def test_every_operator_between_nodes(P_world: Partition) -> None:
    function = modules_chain(P_world)
    x = random((4, 6), 1)[:, :3].requires_grad_() if P_world.rank < 2 else placeholder(4)
    assert_equal_to_eager(compiled(function), function, x)


@distributed(ranks=2, transports=["loopback"])
def test_ranks_that_are_threads(P_world: Partition) -> None:
    """They share the compiled code, whose guards tell their graphs apart."""
    P_x = partition_of(P_world, [1, 0], [1, 2])
    given = ops.HaloExchange(P_x, halo=((1, 2),), global_shape=(4, 6))
    warm = ops.HaloExchange(P_x, halo=((1, 2),))
    x = random((4, 6), 1)[:, :3].requires_grad_()
    warm(x)
    for operator in (given, warm):
        # Not compiled(): another thread's graphs are in use.
        graph = torch.compile(operator, fullgraph=True, backend="aot_eager")
        assert_equal_to_eager(graph, operator, x)


@distributed(ranks=2, transports=["loopback"])
def test_threads_cannot_agree_while_one_compiles(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    graph = torch.compile(
        ops.HaloExchange(P_x, halo=((1, 1),)), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="would wait for other threads"):
        graph(torch.ones(2, 3))


def independent_movements(P_world: Partition, count: int) -> Function:
    """Movements that nothing orders but the program, after more or less work on each rank."""
    P_x = partition_of(P_world, range(2), [1, 2])
    operators = [ops.HaloExchange(P_x, halo=((1, i),)) for i in range(count)]
    total = ops.AllSumReduce(P_x, [1])

    def function(x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for i, operator in enumerate(operators):
            work = x
            for _ in range(5 * (i if P_world.rank == 0 else count - i)):
                work = work.sin()
            parts.append(operator(work).sum())
            # Used on one rank alone.
            unused = total(data * i)
            if P_world.rank == 1:
                parts.append(unused.sum())
        return torch.stack(parts)

    return function


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@distributed(ranks=2, transports=["host"], timeout_s=120)
def test_order_is_the_programs(P_world: Partition, backend: str) -> None:
    """No movement overtakes another, or is deleted where its output is unused."""
    function = independent_movements(P_world, 3)
    x, data = random((2, 4), 1).requires_grad_(), random((3, 3), 2)
    function(x, data)
    graph = compiled(function, backend)
    before = operations(P_world)
    eager = gradients(function, x, data)
    between = operations(P_world)
    actual = gradients(graph, x, data)
    assert operations(P_world) - between == between - before == 3 * 3 + 1
    torch.testing.assert_close(actual, eager)


@distributed(ranks=2, transports=["host"])
def test_operators_alike_have_graphs_of_their_own(P_world: Partition) -> None:
    P_x, P_reversed = partition_of(P_world, [0, 1], [1, 2]), partition_of(P_world, [1, 0], [1, 2])
    torch.compiler.reset()
    x = random((2, 4), P_world.rank).requires_grad_()
    for P in (P_x, P_reversed):
        for width in (1, 2):
            operator = ops.HaloExchange(P, halo=((width, 0),))
            graph = torch.compile(operator, fullgraph=True, backend="aot_eager")
            assert_equal_to_eager(graph, operator, x)


@distributed(ranks=2, transports=["host"])
def test_a_graph_is_for_the_partition_it_was_given(P_world: Partition) -> None:
    P_x, P_reversed = partition_of(P_world, [0, 1], [1, 2]), partition_of(P_world, [1, 0], [1, 2])
    x = random((2, 4), P_world.rank)

    def widened(x: torch.Tensor, P: Partition) -> torch.Tensor:
        return gpudist.halo_exchange(x, P, halo=((1, 0),))

    graph = compiled(widened)
    for P in (P_x, P_reversed, P_x):
        torch.testing.assert_close(graph(x, P), widened(x, P), rtol=0, atol=0)


@distributed(ranks=2, transports=["host"])
def test_other_batches_are_compiled_without_an_agreement(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    operator = ops.HaloExchange(P_x, halo=((1, 1),))
    graph = compiled(lambda x: operator(x) * 2)
    graph(torch.ones(5, 3))
    for batch in (5, 2, 5, 3, 2):
        before = operations(P_world)
        y = graph(torch.full((batch, 3), 2.0))
        assert operations(P_world) - before == 2
        assert y.shape == (batch, 5) and y[:, 1:4].eq(4).all()


@distributed(ranks=2, transports=["host"])
def test_one_rank_alone_may_compile_again(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    operator = ops.HaloExchange(P_x, halo=((1, 1),))
    graph = compiled(lambda x, factor: operator(x) * factor)
    graph(torch.ones(2, 3), 2)
    before = operations(P_world)
    for x in (torch.ones(2, 3), torch.ones(3, 2).T if P_world.rank == 0 else torch.ones(2, 3)):
        torch.testing.assert_close(graph(x, 2), operator(x) * 2)
    assert operations(P_world) - before == 1 + 4


@distributed(ranks=2, transports=["host"])
def test_dynamic_operators_agree_at_every_call(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    operator = ops.HaloExchange(P_x, halo=((1, 1),), shape="dynamic")
    graph = compiled(lambda x: operator(x))
    for width in (3, 4, 3):
        assert_equal_to_eager(graph, operator, random((2, width), 1).requires_grad_())
    before = operations(P_world)
    graph(random((2, 3), 1).requires_grad_())
    assert operations(P_world) - before == 1 + 2


@distributed(ranks=2, transports=["host"])
def test_dynamic_broadcasts_are_told_at_every_call(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([0])
    operator = ops.Broadcast(P_x, P_world, shape="dynamic")
    graph = compiled(lambda x: operator(x))
    for width in (3, 4, 3):
        x = random((2, width), 1) if P_x.active else torch.empty(width, 0).double()
        assert_equal_to_eager(graph, operator, x.requires_grad_())


@distributed(ranks=2, transports=["host"])
def test_blocks_a_graph_was_not_compiled_for_are_refused(P_world: Partition) -> None:
    """One rank's block changes; the graph of the other, which cannot see it, raises on both."""
    P_x = partition_of(P_world, [0, 1], [1, 2])
    operator = ops.HaloExchange(P_x, halo=((1, 1),), shape="dynamic")
    graph = compiled(lambda x: operator(x))
    graph(torch.ones(2, 3))
    with pytest.raises(PlanMismatch, match="this rank's graph was compiled for other blocks"):
        graph(torch.ones(2, 4 if P_world.rank == 1 else 3))
        graph(torch.ones(2, 3))


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(ranks=2, transports=["host"])
def test_checkpoint_around_a_graph(P_world: Partition, reentrant: bool) -> None:
    """Rank 1 saves nothing of its own, but recomputes too."""
    P_0 = P_world.create_partition_inclusive([0])
    reduce, broadcast = ops.SumReduce(P_world, P_0), ops.Broadcast(P_0, P_world)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = reduce(x)
        return broadcast(y * y if P_0.active else y)

    graph = compiled(function)
    x = random((2, 3), 1 + P_world.rank).requires_grad_()

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(graph, x, use_reentrant=reentrant)  # pyright: ignore

    expected = gradients(function, x)
    torch.testing.assert_close(gradients(checkpointed, x), expected)
    before = operations(P_world)
    torch.testing.assert_close(gradients(checkpointed, x), expected)
    assert operations(P_world) - before == 1 + 2 * 3


@distributed(ranks=2, transports=["host"])
def test_checkpoint_within_a_graph(P_world: Partition) -> None:
    """Moved tensors are kept: only rank 0 recomputes, and nothing may move for one rank alone."""
    P_0 = P_world.create_partition_inclusive([0])
    reduce, broadcast = ops.SumReduce(P_world, P_0), ops.Broadcast(P_0, P_world)

    def body(x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        y, constant = reduce(x.sin()), reduce(data)
        return broadcast(y.cos() * constant.cos() if P_0.active else y)

    graph = compiled(lambda x, data: checkpoint(body, x, data, use_reentrant=False))
    x, data = random((2, 3), 1 + P_world.rank).requires_grad_(), random((2, 3), 3)
    expected = gradients(body, x, data)
    torch.testing.assert_close(gradients(graph, x, data), expected)
    before = operations(P_world)
    torch.testing.assert_close(gradients(graph, x, data), expected)
    assert operations(P_world) - before == 1 + 3 + 2


@distributed(ranks=2, transports=["host"])
def test_backward_outlives_the_operator(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    operator = ops.HaloExchange(P_x, halo=((1, 1),))
    x = torch.ones(1, 3, requires_grad=True)
    y = compiled(operator)(x)
    del operator
    torch.compiler.reset()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == ([[1.0, 1.0, 2.0]] if P_world.rank == 0 else [[2.0, 1.0, 1.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64], ids=str)
@distributed(ranks=2, transports=["host"])
def test_the_librarys_operations_pass_opcheck(P_world: Partition, dtype: torch.dtype) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    halo = ops.HaloExchange(P_x, halo=((1, 1),), padding_value=2.0)
    broadcast = ops.Broadcast(P_world.create_partition_inclusive([0]), P_world)
    differentiable = dtype.is_floating_point or dtype.is_complex
    x = cells((2, 3)).to(dtype).requires_grad_(differentiable)
    root = x if P_world.rank == 0 else placeholder(2).to(dtype).detach()
    root = root.detach().requires_grad_(differentiable)
    handles = [handle_of(halo.movement(x)), handle_of(broadcast.movement(root))]
    move, library = torch.ops.gpudist.move.default, torch.ops.gpudist
    torch.library.opcheck(move, (handles, [x, root], None))
    torch.library.opcheck(move, (handles, [x.detach(), root], None))
    P = handle_of(P_world)
    if not dtype.is_complex:
        torch.library.opcheck(library.all_reduce.default, (P, x.detach(), "max", None))
    torch.library.opcheck(library.invariant_sum.default, (P, x, None))
    torch.library.opcheck(library.invariant_copy.default, (P, x, None))


@pytest.mark.parametrize("nested", [False, True])
@distributed(ranks=2, transports=["host", "nccl"])
def test_graphs_know_how_outputs_lie_in_memory(P_world: Partition, nested: bool) -> None:
    """Over NCCL channels-last stays; what is compiled for other strides would read other cells."""
    for form in (torch.contiguous_format, torch.channels_last):
        P_x = partition_of(P_world, [0, 1], [1, 1, 1, 2])
        halo = ops.HaloExchange(P_x, halo=((0, 0), (0, 0), (1, 1), (1, 1)), nested=nested)
        x = cells((2, 3, 4, 5)).to(memory_format=form)
        movement = halo.movement(x)
        for given, handle in ((x, handle_of(movement)), (halo(x), adjoint_of(handle_of(movement)))):
            (y, _) = torch.ops.gpudist.move([handle], [given], None)
            with FakeTensorMode() as mode:
                (traced, _) = torch.ops.gpudist.move([handle], [mode.from_tensor(given)], None)
            assert (traced.shape, traced.stride()) == (y.shape, y.stride())
            assert y.is_contiguous(memory_format=form) or P_world.transport == "host"


@distributed(ranks=1, transports=["host"])
def test_tangents_are_refused(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0], [1, 1])
    operator = ops.HaloExchange(P_x, halo=((1, 1),))
    x = torch.ones(2, 3)
    graph = compiled(operator)
    # By the library, or by torch 2.15 before it.
    refusal = "no forward mode|does not support input tensors that carry a forward-mode AD tangent"
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=refusal):
        graph(forward_ad.make_dual(x, x))
    graph = compiled(lambda x: torch.func.jvp(operator, (x,), (x,))[1])
    with pytest.raises(Exception, match="no forward mode"):
        graph(x)


@distributed(ranks=1, transports=["host"])
def test_a_handle_of_nothing_is_refused(P_world: Partition) -> None:
    with pytest.raises(RuntimeError, match="handle 8, which does not exist"):
        torch.ops.gpudist.move([8], [torch.ones(2)], None)
    bound = BindCache[int]("static")
    assert handle_of(bound) == handle_of(bound) != handle_of(BindCache[int]("static"))
    assert handle_of(bound) % 4 == 0
