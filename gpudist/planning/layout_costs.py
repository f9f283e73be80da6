"""Time and memory of single functions and moves of a forward, by the layouts of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from gpudist.errors import GpudistError
from gpudist.geometry.layout import NdSbp, broadcast, partial_sum, split
from gpudist.planning.clock import Clock, Kernel, Kernels
from gpudist.planning.forward_graph import Node, TensorInfo
from gpudist.sbp.call import fill_slots
from gpudist.sbp.global_spec import global_spec, local_of, spec_of, wrap
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.placement import Placement
from gpudist.sbp.scope import Scope, enter_scope
from gpudist.sbp.trees import tensors_in
from gpudist.transport.dry import META

# For each axis of the placement, whether tensors are whole on all of its workers.
State = tuple[bool, ...]


def layout_in(sbp: NdSbp, state: State) -> NdSbp:
    """Return the layout of a tensor that is ``sbp`` on the grid, in the state of a function.

    Sizes of blocks are those of the grid's, unless another axis no longer splits the dim.
    """
    joined = {
        attribute.dim
        for attribute, whole in zip(sbp, state, strict=True)
        if whole and attribute.is_split
    }
    return tuple(
        broadcast
        if whole
        else split(attribute.dim)
        if attribute.is_split and attribute.dim in joined
        else attribute
        for attribute, whole in zip(sbp, state, strict=True)
    )


def without_sizes(sbp: NdSbp) -> NdSbp:
    """Return the layout without sizes of blocks, which would fit inputs of one size only."""
    return tuple(split(attribute.dim) if attribute.is_split else attribute for attribute in sbp)


@dataclass(frozen=True)
class Work:
    """Predicted work of a rank for one function, forward and backward.

    Attributes:
        seconds: time.
        forward_s: time of the forward, which an activation checkpoint repeats.
        keeps_inputs: whether backward needs each tensor among the arguments.
        keeps_outputs: whether backward needs each result.
        kept_bytes: bytes of all else that backward needs.
        sent_bytes: bytes of messages and collectives, forward and backward.
    """

    seconds: float
    forward_s: float = 0.0
    keeps_inputs: tuple[bool, ...] = ()
    keeps_outputs: tuple[bool, ...] = ()
    kept_bytes: int = 0
    sent_bytes: int = 0


class LayoutCosts:
    """Costs of functions and moves on one rank, each computed once.

    A function is called on tensors without data, in the scope of the network, and its kernels and
    messages are timed as in a rehearsal.

    Args:
        scope: scope of the network, on the transport of the rank.
        clock: listener to the transport.
        training: whether to count backward.

    Attributes:
        placement: placement of the network's tensors.
    """

    def __init__(self, scope: Scope, clock: Clock, training: bool) -> None:
        self._scope, self._clock, self._training = scope, clock, training
        self.placement: Placement = scope.placement
        self._works: dict[Any, Work | None] = {}

    def work(self, node: Node, state: State) -> Work | None:
        """Return the work of a function in a state; ``None`` if it has no such state."""
        inputs, outputs = (
            tuple(self._in_state(tensor, state) for tensor in tensors)
            for tensors in (node.inputs, node.outputs)
        )
        key = node.key, inputs, outputs
        if key not in self._works:
            self._works[key] = self._rehearse(
                node.compute, inputs, lambda tensors: fill_slots(node.args, tensors),
                [tensor.sbp for tensor in outputs], node.autocast,
            )  # fmt: skip
        return self._works[key]

    def move(self, tensor: TensorInfo, source: State, target: State) -> Work | None:
        """Return the work of moving a tensor between two states; ``None`` if it cannot move."""
        assert tensor.sbp is not None
        there, back = layout_in(tensor.sbp, source), without_sizes(layout_in(tensor.sbp, target))
        if layout_in(tensor.sbp, source) == layout_in(tensor.sbp, target):
            return Work(0.0)
        if partial_sum in there or partial_sum in back:
            return None
        moved = replace(tensor, sbp=there)
        key = moved, back
        if key not in self._works:

            def compute(args: Any, kwargs: Any) -> Any:
                self._clock.add_layers(1)
                return args[0].to_global(sbp=back)

            self._works[key] = self._rehearse(compute, [moved], lambda x: ((x[0],), {}))
        return self._works[key]

    def sum_s(self, tensor: TensorInfo, state: State, terms: int) -> float:
        """Return the seconds in which backward adds the gradients of a tensor's uses."""
        if terms < 2 or not tensor.requires_grad or not self._training:
            return 0.0
        size_bytes = 3 * self.block_bytes(tensor, state)
        phase = self._clock.begin()
        for _ in range(terms - 1):
            self._clock.add_kernel(Kernel(0, size_bytes, tensor.dtype))
        return phase.serial_s

    def block_bytes(self, tensor: TensorInfo, state: State) -> int:
        """Return the bytes of the rank's block of a tensor."""
        return prod(self._block(self._in_state(tensor, state))) * tensor.dtype.itemsize

    def _in_state(self, tensor: TensorInfo, state: State) -> TensorInfo:
        if tensor.sbp is None:
            return tensor
        return replace(tensor, sbp=layout_in(tensor.sbp, state))

    def _block(self, tensor: TensorInfo) -> tuple[int, ...]:
        if tensor.sbp is None:
            return tensor.shape
        index = self.placement.index
        assert index is not None
        return self.placement.layout(tensor.sbp, tensor.shape).box(index).shape

    def _rehearse(
        self,
        compute: Callable[[Any, Any], Any],
        inputs: Sequence[TensorInfo],
        arguments: Callable[[Sequence[torch.Tensor]], Any],
        outputs: Sequence[NdSbp | None] | None = None,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Work | None:
        # None if the call fails, or its results are in other layouts.
        try:
            # The first call makes layers and plans.
            self._time_call(compute, inputs, arguments, None, autocast)
            return self._time_call(compute, inputs, arguments, outputs, autocast)
        except (GpudistError, RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return None

    def _time_call(
        self,
        compute: Callable[[Any, Any], Any],
        inputs: Sequence[TensorInfo],
        arguments: Callable[[Sequence[torch.Tensor]], Any],
        outputs: Sequence[NdSbp | None] | None,
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> Work | None:
        leaves = [torch.empty(self._block(x), dtype=x.dtype, device=META) for x in inputs]
        learns = [x.requires_grad and self._training for x in inputs]
        with torch.set_grad_enabled(self._training):
            for leaf, learn in zip(leaves, learns, strict=True):
                leaf.requires_grad_(learn)
            # Functions may change their arguments in place.
            local = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
            tensors = [self._wrap(*pair) for pair in zip(local, inputs, strict=True)]
            saved: dict[int, int] = {}

            def keep(x: torch.Tensor) -> torch.Tensor:
                storage = x.untyped_storage()
                saved[storage._cdata] = storage.nbytes()
                return x.detach()

            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
            with torch.device(META), Kernels(self._clock):
                forward = self._clock.begin()
                with enter_scope(self._scope), hooks, autocast():
                    results = tensors_in(compute(*arguments(tensors)))
                if outputs is not None:
                    layouts = [spec_of(y).sbp for y in results if isinstance(y, GlobalTensor)]
                    if outputs and layouts != list(outputs):
                        return None
                backward = self._clock.begin()
                ends = [x for y in results if (x := local_of(y)).requires_grad]
                wanted = [x for x, learn in zip(leaves, learns, strict=True) if learn]
                if ends and wanted:
                    slopes = [torch.empty_like(y) for y in ends]
                    torch.autograd.grad(ends, wanted, slopes, allow_unused=True)
        overlaps = self._clock.profile.overlaps
        forward_s, backward_s = (
            p.overlapped_s if overlaps else p.serial_s for p in (forward, backward)
        )
        sent_bytes = sum(p.message_bytes + p.collective_bytes for p in (forward, backward))
        return Work(
            forward_s + backward_s, forward_s, *_sort_saved(saved, local, results), sent_bytes
        )  # fmt: skip

    def _wrap(self, x: torch.Tensor, tensor: TensorInfo) -> torch.Tensor:
        if tensor.sbp is None:
            return x
        return wrap(
            GlobalTensor, x, global_spec(self.placement, tensor.sbp, tensor.shape, tensor.dtype)
        )


def _sort_saved(
    saved: dict[int, int],
    local: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> tuple[tuple[bool, ...], tuple[bool, ...], int]:
    """Return which arguments and results were saved, and the bytes of all else."""

    def is_kept(x: torch.Tensor) -> bool:
        return x.untyped_storage()._cdata in saved

    places = [x.untyped_storage()._cdata for x in (*local, *map(local_of, results))]
    other_bytes = sum(nbytes for place, nbytes in saved.items() if place not in places)
    return tuple(map(is_kept, local)), tuple(is_kept(local_of(y)) for y in results), other_bytes
