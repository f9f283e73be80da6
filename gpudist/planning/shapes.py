"""Global shapes of what a network makes on its way, from one run of the sequential network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Decomposition
from gpudist.library import Watching

Shape = tuple[int, ...]


@dataclass
class Call:
    """One call of a module.

    Attributes:
        inputs, outputs: shapes of its tensors.
        made: shapes of all that was made in it, in order.
    """

    inputs: list[Shape]
    outputs: list[Shape] = field(default_factory=list[Shape])
    made: list[Shape] = field(default_factory=list[Shape])


class GlobalShapes:
    """What each module of a network was called with; finds the tensor that a block is of.

    Args:
        network: the sequential one; its parameters are on the device of ``inputs``.
        inputs: without cells, on the device ``meta``.
    """

    def __init__(self, network: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self.calls: dict[str, list[Call]] = {}
        self._leaves = {
            path for path, module in network.named_modules() if not any(module.children())
        }
        self._open: list[Call] = []
        self._where: list[tuple[str, int]] = []
        handles = [
            handle
            for path, module in network.named_modules()
            for handle in (
                module.register_forward_pre_hook(partial(self._enter, path)),
                module.register_forward_hook(self._leave),
            )
        ]
        try:
            with torch.no_grad(), _Recording(self._open):
                network(*inputs)
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def followed(self, network: nn.Module) -> Iterator[None]:
        """While a converted network runs, know in which module it is."""
        counts: Counter[str] = Counter()

        def enter(path: str, module: nn.Module, args: object) -> None:
            self._where.append((path, counts[path]))
            counts[path] += 1

        def leave(*_: object) -> None:
            self._where.pop()

        handles = [
            handle
            for path, module in network.named_modules()
            for handle in (
                module.register_forward_pre_hook(partial(enter, path)),
                module.register_forward_hook(leave, always_call=True),
            )
        ]
        try:
            yield
        finally:
            self._where.clear()
            for handle in handles:
                handle.remove()

    def global_shape_of(
        self, shape: Sequence[int], grid: Sequence[int], index: Sequence[int]
    ) -> Shape:
        """The global shape of the tensor of which the block at ``index`` of ``grid`` has ``shape``.

        Raises:
            ShapeError: nothing in the network has such blocks, or several things have.
        """
        shape = tuple(shape)
        if all(parts == 1 for parts in grid):
            return shape
        for candidates in self._candidates():
            fitting = {s for s in candidates if _has_block(s, shape, grid, index)}
            if len(fitting) == 1:
                return fitting.pop()
            if fitting:
                raise ShapeError(
                    f"the block {list(shape)} at {list(index)} of {list(grid)} may be of any of "
                    f"{sorted(map(list, fitting))}: the planner cannot tell; ask for another shape"
                )
        raise ShapeError(
            f"the block {list(shape)} at {list(index)} of {list(grid)} is that of no tensor of the "
            "sequential network in balanced blocks, which is all that the planner knows"
        )

    def _candidates(self) -> Iterator[Iterable[Shape]]:
        """Shapes that the tensor may have, the likely ones first."""
        for path, number in reversed(self._where):
            calls = self.calls.get(path)
            if calls is None:
                continue
            call = calls[number % len(calls)]
            if path in self._leaves:
                yield call.inputs
                yield call.outputs
            yield (*call.inputs, *call.made)

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        call = Call(_shapes(args))
        self.calls.setdefault(path, []).append(call)
        self._open.append(call)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._open.pop().outputs = _shapes(output)


class _Recording(Watching):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = _shapes(result)
        if func is torch.ops.aten.mean.dim:
            made.append(_pooled(*args[:2]))
        for call in self._calls:
            call.made += made
        return result


def _shapes(tree: Any) -> list[Shape]:
    return [tuple(t.shape) for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _pooled(x: torch.Tensor, dims: Sequence[int] | None) -> Shape:
    """Of a mean with the dims that it loses, which a converted network has until it flattens."""
    pooled = {dim % max(1, x.dim()) for dim in dims or range(x.dim())}
    return tuple(1 if dim in pooled else extent for dim, extent in enumerate(x.shape))


def _has_block(whole: Shape, shape: Shape, grid: Sequence[int], index: Sequence[int]) -> bool:
    if len(whole) != len(shape) or len(grid) != len(shape):
        return False
    return Decomposition.balanced(whole, grid).block(index).shape == shape
