"""The contract of a layer: questions about any row of ``LAYERS``, asked on grids of workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import gpudist
from gpudist.checkpoint import full_state_dict, load_full_state_dict
from gpudist.errors import PartitionError, ShapeError
from gpudist.nn.layer_table import Layer
from gpudist.sbp.registry import signatures
from gpudist.testing import run_distributed
from gpudist.world.partition import CartesianPartition, Partition
from tests.every import EVERY
from tests.nn.compare import (
    SEED,
    Slices,
    assert_block_of,
    assert_equal_to,
    own_block,
    own_slices,
)

F64 = torch.float64
# Relative and absolute; sums over ranks add in another order.
TOLERANCE = {F64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.15}
Grid = tuple[int, ...]


class Pair:
    """A layer on a grid beside the sequential one, with equal parameters, and the sample's tensors.

    Attributes:
        wholes: the global inputs; those with a gradient require it.
        blocks: this rank's blocks of them.
    """

    def __init__(
        self, row: Layer, P_x: CartesianPartition, dtype: torch.dtype = F64, **more: Any
    ) -> None:
        """Make both layers; ``more`` are arguments of the distributed one alone."""
        row = replace(row, arguments={**row.arguments, **more})
        self.row, self.P_x = row, P_x
        torch.default_generator.manual_seed(SEED)
        self.sequential = row.make_sequential().to(dtype)
        torch.default_generator.manual_seed(SEED)
        self.layer = row.make(P_x).to(dtype)
        generator = torch.Generator().manual_seed(SEED)
        self.wholes = [sample.draw(generator, dtype) for sample in row.inputs]
        self.partitions = [self._partition_of(x) for x in self.wholes]
        for x in self.wholes:
            x.requires_grad_(x.is_floating_point() and not self._is_target(x))
        pairs = list(zip(self.wholes, self.partitions, strict=True))
        self.blocks = [own_block(x, P, requires_grad=x.requires_grad) for x, P in pairs]

    def _is_target(self, x: torch.Tensor) -> bool:
        return self.row.family == "loss" and x is not self.wholes[0]

    def _partition_of(self, x: torch.Tensor) -> CartesianPartition:
        """Partition of an input: a target without classes has no axis for them."""
        if x.dim() == self.P_x.dim:
            return self.P_x
        if self.P_x.shape[1] > 1:
            raise Untold("the target has no axis of classes")
        return self.P_x.create_cartesian_topology_partition(
            [n for axis, n in enumerate(self.P_x.shape) if axis != 1]
        )

    def inputs_as(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the global inputs and the blocks, those of floating point in ``dtype``."""

        def converted(x: torch.Tensor) -> torch.Tensor:
            made = x.detach().to(dtype) if x.is_floating_point() else x.detach()
            return made.requires_grad_(x.requires_grad)

        return [*map(converted, self.wholes)], [*map(converted, self.blocks)]

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the sequential layer and of this one, with equal random numbers."""
        return self.run_one(self.sequential, self.wholes), self.run_one(self.layer, self.blocks)

    @staticmethod
    def run_one(layer: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        torch.default_generator.manual_seed(SEED)
        y = layer(*inputs)
        return y[0] if isinstance(y, tuple) else y

    def own(self, y: torch.Tensor) -> Slices | None:
        """Return the slices of this rank's block in a global output.

        ``None`` outside the partition.
        """
        if not y.dim():
            return ()
        shape = [*self.P_x.shape, *[1] * (y.dim() - self.P_x.dim)]
        P_y: Any = getattr(self.layer, "P_y", None) or self.P_x
        if P_y.dim != y.dim():
            P_y = self.P_x.create_cartesian_topology_partition(shape)
        return own_slices(y.shape, P_y)

    def backward(self, y_whole: torch.Tensor, y: torch.Tensor) -> None:
        """Backward of both, from blocks of one random gradient; a loss is one number."""
        generator = torch.Generator().manual_seed(SEED + 1)
        gradient = torch.randn(y_whole.shape, generator=generator, dtype=F64).to(y_whole.dtype)
        where = self.own(y_whole)
        y_whole.backward(gradient)
        y.backward(torch.zeros_like(y) if where is None else gradient[where])

    def assert_equal(self, y_whole: torch.Tensor, y: torch.Tensor, tolerance: float) -> None:
        """Compare outputs, and gradients of inputs and parameters, after :meth:`backward`."""
        name = f"{self.row.name} on {list(self.P_x.shape)}"
        assert y.dtype == y_whole.dtype, f"{name}: {y.dtype}, torch's {y_whole.dtype}"
        whole = y_whole.detach()
        assert_block_of(y.detach(), whole, self.own(whole), f"{name}: output", tolerance)
        for x, block, P in zip(self.wholes, self.blocks, self.partitions, strict=True):
            if x.requires_grad:
                assert x.grad is not None
                where = own_slices(x.shape, P)
                assert_block_of(block.grad, x.grad, where, f"{name}: gradient of x", tolerance)
        gradients = whole_gradients(self.layer)
        for key, parameter in self.sequential.named_parameters():
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None
            assert_equal_to(gradients[key], parameter.grad, tolerance, f"{name}: of {key}")


class Untold(Exception):
    """The sample does not declare anything for this grid."""


def whole_gradients(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of the parameters, each gathered as its parameter is."""
    of = deepcopy(layer)
    pairs = zip(layer.parameters(), of.parameters(), strict=True)
    with torch.no_grad():
        for parameter, gradient in pairs:
            gradient.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    return full_state_dict(of, to_all=True)


def grids(row: Layer, every: bool = EVERY) -> Iterator[Grid]:
    """Return grids with one dim cut, in 2 or in 3, and with two dims cut in 2.

    With ``every`` each dim is cut in 2 and in 3, and each pair of dims; otherwise adjacent ones.
    """
    dims = len(row.inputs[0].shape)
    for dim in range(dims):
        for parts in (2, 3) if every else (3 - dim % 2,):
            yield tuple(parts if d == dim else 1 for d in range(dims))
    for pair in combinations(range(dims), 2) if every else pairwise(range(dims)):
        yield tuple(2 if d in pair else 1 for d in range(dims))


def on_grid(row: Layer, shape: Grid, check: Callable[[Pair], None]) -> str | None:
    """Return how all ranks refuse the grid, when the layer is made or called; ``None`` if not."""
    ends = run_distributed(_end, prod(shape), row, shape, check, timeout=30.0)
    assert len(set(ends)) == 1, f"{row.name} on {list(shape)}: ranks end differently: {ends}"
    return ends[0]


def _end(P_world: Partition, row: Layer, shape: Grid, check: Callable[[Pair], None]) -> str | None:
    try:
        check(Pair(row, P_world.create_cartesian_topology_partition(shape)))
    except (PartitionError, ShapeError, Untold) as error:
        return f"{type(error).__name__}: {error}"
    return None


def check_on(row: Layer, chosen: Sequence[Grid], check: Callable[[Pair], None], most: int) -> None:
    """Check the layer on the first grids that it takes.

    Args:
        most: number of grids it has to take for this to be enough.
    """
    taken = 0
    reasons: list[str] = []
    for shape in chosen:
        end = on_grid(row, shape, check)
        if end is None:
            taken += 1
        elif end.startswith("Untold"):
            reasons.append(end)
        if taken == most:
            return
    if not taken and reasons:
        pytest.skip(reasons[0])
    assert taken, f"{row.name}: no grid of {chosen} is taken"


def same_as_sequential(pair: Pair, tolerance: float = TOLERANCE[F64]) -> None:
    """Output, and gradients of inputs and parameters."""
    y_whole, y = pair.run()
    pair.backward(y_whole, y)
    pair.assert_equal(y_whole, y, tolerance)


def adjoint(pair: Pair) -> None:
    """``<J v, w> = <v, J* w>``, where ``J`` is the transpose of the transpose: double backward."""
    x = pair.blocks[0]
    if not x.requires_grad:
        raise Untold("its input has no gradient")
    y = pair.run_one(pair.layer, pair.blocks)
    w = torch.randn_like(y) if y.dim() else torch.ones_like(y)
    w.requires_grad_()
    v = torch.randn_like(x)
    (back,) = torch.autograd.grad(y, x, w, create_graph=True)
    right = (v * back).sum()
    assert back.requires_grad, f"{pair.row.name}: a gradient does not depend on the output's"
    (moved,) = torch.autograd.grad(right, w)
    left = (moved * w).sum().item() / (1 if y.dim() else pair.P_x.size)
    pairs = pair.P_x.allreduce_data([left, right.item()])
    assert abs(pairs[0] - pairs[1]) <= 1e-11 * max(1.0, *map(abs, pairs)), pairs


def penalty_on_gradients(pair: Pair) -> None:
    """Gradients of a penalty on the gradients of inputs and parameters."""
    outputs: list[torch.Tensor] = []
    for layer, inputs in ((pair.sequential, pair.wholes), (pair.layer, pair.blocks)):
        learned = [x for x in (*inputs, *layer.parameters()) if x.requires_grad]
        if not learned:
            raise Untold("nothing has a gradient")
        y = pair.run_one(layer, inputs)
        outputs.append(y)
        firsts = torch.autograd.grad(y.pow(3).sum(), learned, create_graph=True, allow_unused=True)
        squares = [first.square().sum() for first in firsts if first is not None]
        try:
            torch.stack(squares).sum().backward()
        except RuntimeError as error:
            if layer is pair.layer:
                raise
            raise Untold(f"torch: {error}") from None
    pair.assert_equal(outputs[0], outputs[1], 1e-8)


def frozen(pair: Pair) -> None:
    """Gradients of the rest where the inputs, or one of the parameters, require none."""
    names = [name for name, _ in pair.sequential.named_parameters()]
    if not names:
        raise Untold("the layer has no parameters")
    learned = [x.requires_grad for x in pair.wholes]
    for kept in ("inputs", *names):
        for x, block, learns in zip(pair.wholes, pair.blocks, learned, strict=True):
            x.requires_grad_(learns and kept != "inputs").grad = None
            block.requires_grad_(x.requires_grad).grad = None
        for layer in (pair.sequential, pair.layer):
            layer.zero_grad()
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(name != kept)
        y_whole, y = pair.run()
        assert y.requires_grad == y_whole.requires_grad, kept
        if not y.requires_grad:
            continue
        pair.backward(y_whole, y)
        assert all(block.grad is None for block in pair.blocks) == (kept == "inputs")
        if kept != "inputs":
            assert pair.layer.get_parameter(kept).grad is None, kept
        pair.assert_equal(y_whole, y, TOLERANCE[F64])


def agreed(pair: Pair, **agreement: Any) -> None:
    """Results where shapes are agreed on at every call, or given to the constructor."""
    taken = inspect.signature(pair.row.kind).parameters
    if not agreement.keys() <= taken.keys():
        raise Untold(f"no argument {', '.join(agreement)}")
    same_as_sequential(Pair(pair.row, pair.P_x, **agreement))


def agreed_before(pair: Pair) -> None:
    """Results where the constructor is given the global shape."""
    agreed(pair, global_shape=tuple(pair.wholes[0].shape))


def forward_mode(pair: Pair) -> None:
    """Test tangents in a world of one, since dual levels belong to the process."""
    x, whole = pair.blocks[0], pair.wholes[0]
    if not x.requires_grad:
        raise Untold("its input has no gradient")
    v = torch.randn_like(x)
    found: list[Any] = []
    for run, first, rest in ((pair.sequential, whole, pair.wholes), (pair.layer, x, pair.blocks)):
        with forward_ad.dual_level():
            try:
                y = pair.run_one(run, [forward_ad.make_dual(first, v), *rest[1:]])
            except NotImplementedError as error:
                raise Untold(f"torch: {error}") from None
            found.append(forward_ad.unpack_dual(y).tangent)
    assert_equal_to(found[1], found[0], TOLERANCE[F64], pair.row.name)


def dtype(pair: Pair, of: torch.dtype) -> None:
    """Numbers of another precision, of torch's dtype."""
    pair = Pair(pair.row, pair.P_x, of)
    try:
        pair.run_one(pair.sequential, pair.wholes)
    except NotImplementedError as error:
        raise Untold(f"torch: {error}") from None
    same_as_sequential(pair, TOLERANCE[of])


def autocast(pair: Pair, of: torch.dtype = torch.float32) -> None:
    """The dtypes that torch's layer has under autocast, and its numbers; inputs are ``of``."""
    pair = Pair(pair.row, pair.P_x, torch.float32)
    pair.wholes, pair.blocks = pair.inputs_as(of)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_whole, y = pair.run()
    assert y.dtype == y_whole.dtype
    if y.requires_grad:
        pair.backward(y_whole, y)
    for whole, block in zip(pair.wholes, pair.blocks, strict=True):
        if whole.grad is not None and block.grad is not None:
            assert block.grad.dtype == whole.grad.dtype
    own = pair.own(y_whole)
    assert_block_of(y.detach(), y_whole.detach(), own, pair.row.name, TOLERANCE[torch.bfloat16])


def cast_after_autocast(pair: Pair) -> None:
    """A layer of 16 bits that was called under autocast while its parameters had 32."""
    pair = Pair(pair.row, pair.P_x, torch.float32)
    pair.wholes, pair.blocks = pair.inputs_as(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair.run()
    pair.sequential.bfloat16()
    pair.layer.bfloat16()
    try:
        y_whole, y = pair.run()
    except NotImplementedError as error:
        raise Untold(f"torch: {error}") from None
    pair.backward(y_whole, y)
    pair.assert_equal(y_whole, y, TOLERANCE[torch.bfloat16])


def checkpointed(pair: Pair, use_reentrant: bool) -> None:
    """The same gradients from an activation checkpoint."""
    if use_reentrant and not any(x.requires_grad for x in pair.blocks):
        raise Untold("a reentrant checkpoint needs an input with a gradient")
    run = partial(checkpoint, pair.layer, use_reentrant=use_reentrant)
    y_whole = pair.run_one(pair.sequential, pair.wholes)
    y = pair.run_one(run, pair.blocks)  # pyright: ignore
    pair.backward(y_whole, y)
    pair.assert_equal(y_whole, y, TOLERANCE[F64])


def compiled(pair: Pair) -> None:
    """Check that one graph without a break, in a world of one, gives the same numbers."""
    torch.compiler.reset()
    run: Any = torch.compile(pair.layer, backend="eager", fullgraph=True)
    y_whole, y = pair.run_one(pair.sequential, pair.wholes), pair.run_one(run, pair.blocks)
    pair.backward(y_whole, y)
    pair.assert_equal(y_whole, y, TOLERANCE[F64])


def state(pair: Pair) -> None:
    """The sequential layer's names; its values after a call, buffers too; and back."""
    pair.run()
    expected = pair.sequential.state_dict()
    full = full_state_dict(pair.layer, to_all=True)
    assert list(full) == list(expected)
    for name, value in expected.items():
        assert_equal_to(full[name], value, TOLERANCE[F64], f"{pair.row.name}: {name}")
    drawn = {k: torch.rand_like(v) if v.is_floating_point() else v for k, v in expected.items()}
    load_full_state_dict(pair.layer, drawn)
    for name, value in full_state_dict(pair.layer, to_all=True).items():
        assert torch.equal(value, drawn[name]), f"{pair.row.name}: {name} was not loaded"


def text(pair: Pair) -> None:
    """``repr`` contains torch's text and the partition."""
    said, parts = repr(pair.layer), pair.sequential.extra_repr()
    assert said.startswith(f"{pair.row.name}(") and f"P_x={list(pair.P_x.shape)}" in said
    assert all(part in said for part in parts.split(", ")), (said, parts)


def failure(pair: Pair) -> None:
    """The first rank fails instead of calling the layer: the others' wait ends, if they wait."""
    if pair.P_x.rank == 0:
        raise FailsFirst
    pair.run_one(pair.layer, pair.blocks)


class FailsFirst(Exception):
    """A rank's own error."""


def rule(pair: Pair) -> None:
    """Torch's own layer on global tensors: output and gradients, by the rule of its function."""
    assert pair.row.function in signatures
    if pair.row.family == "random":
        raise Untold("global tensors draw from another generator")
    network: Any = gpudist.distribute(deepcopy(pair.sequential), pair.P_x)
    y_whole = pair.run_one(pair.sequential, pair.wholes)
    torch.default_generator.manual_seed(SEED)
    blocks = zip(pair.blocks, pair.wholes, strict=True)
    # An input with other dims than P_x has axes is a whole one.
    y = network(*[x if x.dim() == pair.P_x.dim else whole.detach() for x, whole in blocks])
    y = y[0] if isinstance(y, tuple) else y
    assert tuple(y.shape) == tuple(y_whole.shape)
    found = y.full_tensor()
    assert_equal_to(found.detach(), y_whole.detach(), TOLERANCE[F64], pair.row.name)
    if not y_whole.requires_grad:
        return
    gradient = torch.randn(y_whole.shape, dtype=F64)
    y_whole.backward(gradient)
    y.backward(gradient)
    name = f"{pair.row.name} on {list(pair.P_x.shape)}, by the rule"
    for x, block, P in zip(pair.wholes, pair.blocks, pair.partitions, strict=True):
        if x.grad is not None and x.dim() == pair.P_x.dim:
            where = own_slices(x.shape, P)
            assert_block_of(block.grad, x.grad, where, f"{name}: of x", TOLERANCE[F64])
    for key, parameter in network.named_parameters():
        whole = dict(pair.sequential.named_parameters())[key]
        assert whole.grad is not None
        assert_equal_to(parameter.grad, whole.grad, TOLERANCE[F64], f"{name}: of {key}")
