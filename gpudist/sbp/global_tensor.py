"""The global tensor: a wrapper of global shape around this rank's local tensor."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from gpudist.checks.arguments import checked
from gpudist.exchange.tracing import leave_untraced
from gpudist.geometry.layout import Layout, NdSbp, Sbp, broadcast, nd_sbp
from gpudist.nn.distributed_module import DistributedModule
from gpudist.sbp import memory, methods, views
from gpudist.sbp.boxing import box, box_both_ways
from gpudist.sbp.call_cache import call_cached
from gpudist.sbp.global_spec import GlobalSpec, global_spec, wrap
from gpudist.sbp.placement import Placement
from gpudist.sbp.plain import mark_part
from gpudist.sbp.scope import PlanRow, current_scope, place_of_call
from gpudist.world.partition import require_one_world

UNTRACED = (
    "torch.compile does not trace global tensors, and with fullgraph=False runs functions of them "
    "as they are; gpudist.compiled(network) runs a network as one compiled graph"
)


class GlobalTensor(torch.Tensor):
    """A tensor on a placement, with one attribute for each axis of the placement.

    Created by :func:`gpudist.to_global`. ``shape`` and ``dtype`` describe the global tensor, and
    operators compute on it. Operators are collective: every rank of the world calls them, and ranks
    outside the placement hold no cells.

    Each rank's part is an ordinary tensor, which carries the autograd graph; see the README in
    ``gpudist/sbp``.

    Attributes:
        placement: ranks that hold the tensor.
        sbp: attribute along each axis of the placement.
    """

    _local: torch.Tensor
    _global_spec: GlobalSpec

    # Networks ask for these often; torch would call ``__torch_function__``.
    shape: torch.Size = property(attrgetter("_global_spec.size"))  # pyright: ignore

    def dim(self) -> int:
        return len(self._global_spec.size)

    def size(self, dim: int | None = None) -> Any:
        size = self._global_spec.size
        if dim is None:
            return size
        return (
            size[dim] if type(dim) is int and -len(size) <= dim < len(size) else super().size(dim)
        )

    @classmethod
    def _wrap(
        cls,
        local: torch.Tensor,
        placement: Placement,
        sbp: NdSbp,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> GlobalTensor:
        return wrap(cls, local, global_spec(placement, sbp, shape, local.dtype, strides))

    def _with_part(self, local: torch.Tensor) -> GlobalTensor:
        return wrap(GlobalTensor, local, self._global_spec)

    @classmethod
    @leave_untraced(UNTRACED)
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in methods.METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        method = methods.METHODS.get(func)
        if method is not None:
            result = method(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return call_cached(GlobalTensor, func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_local" and views.is_outdated(self):
            return views.renew(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self) -> GlobalTensor:
        return memory.leaf_of(self, self._local.detach())

    @staticmethod
    def __distributed_layer__(
        layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return methods.METHODS[DistributedModule](layer, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is methods.MAY_TAKE_DATA:
            return methods.may_take(*args)
        raise NotImplementedError(
            f"{func} reached a global tensor without passing through a Python function of torch, "
            "for example within a transform of torch.func or under torch.jit.trace; transform or "
            "trace a function of plain tensors: x.full_tensor(), or x.to_local(), this rank's "
            "part. DistributedDataParallel and fully_shard take networks whose parameters are "
            "plain tensors: convert without replicate_parameters=False and Plan.split_weight"
        )

    @property
    def placement(self) -> Placement:
        return self._global_spec.placement

    @property
    def sbp(self) -> NdSbp:
        return self._global_spec.sbp

    @property
    def global_layout(self) -> Layout:
        """Cells of each rank."""
        return self._global_spec.layout

    @property
    def is_copy_everywhere(self) -> bool:
        """Whether each rank of the placement holds the full tensor."""
        return all(attribute == broadcast for attribute in self._global_spec.sbp)

    @checked()
    @leave_untraced(UNTRACED)
    def like(self, local: torch.Tensor) -> GlobalTensor:
        """Return a global tensor with this one's layout whose part on this rank is ``local``."""
        spec = self._global_spec
        return self._wrap(local, spec.placement, spec.sbp, spec.shape, spec.strides)

    @checked()
    @leave_untraced(UNTRACED)
    def to_global(
        self,
        placement: Placement | None = None,
        sbp: Sbp | Sequence[Sbp] | None = None,
        *,
        grad_sbp: Sbp | Sequence[Sbp] | None = None,
    ) -> GlobalTensor:
        """Convert this tensor to other attributes, or to another placement.

        Args:
            placement, sbp, grad_sbp: see :func:`~gpudist.to_global`.

        Returns:
            A global tensor.
        """
        placement = self.placement if placement is None else placement
        require_one_world("to_global", self.placement.partition, placement.partition)
        if sbp is None and placement.axes == self.placement.axes:
            sbp = self.sbp
        target = placement.layout(nd_sbp(sbp or (), placement.axes, self.dim()), tuple(self.shape))
        world = placement.partition.world
        scope = current_scope()
        record = scope.record if scope is not None else None
        sent = record.sent_bytes() if record is not None else 0
        # A network's interception must not take a tensor made here for one that the forward made.
        with torch._C.DisableTorchFunction():
            if grad_sbp is None:
                local = box(self._local, self.global_layout, target, world)
            else:
                passed = self.placement.layout(
                    nd_sbp(grad_sbp, self.placement.axes, self.dim()), tuple(self.shape)
                )
                back = [target.dual, passed, self.global_layout.dual]
                local = box_both_ways(self._local, [self.global_layout, target], back, world)
        if record is not None and scope is not None and self.global_layout != target:
            record.add(
                PlanRow(
                    place_of_call(scope)[0], "to_global", str(self.sbp), str(target.sbp),
                    self.numel(), record.sent_bytes() - sent, False, False,
                )
            )  # fmt: skip
        strides = self._global_spec.strides
        return self._wrap(local, placement, target.sbp, tuple(self.shape), strides)

    @checked()
    @leave_untraced(UNTRACED)
    def to_local(self, *, grad_sbp: Sbp | Sequence[Sbp] | None = None) -> torch.Tensor:
        """Return this rank's part: a block, copy or term; empty outside the placement.

        Args:
            grad_sbp: attributes of the gradient whose parts are the ranks' gradients; by default
                the dual of ``sbp``, so that the gradient of a copy is a term.

        Returns:
            An ordinary tensor on the autograd graph, which shares memory with this one.
        """
        if grad_sbp is None:
            return mark_part(self._local.view_as(self._local), self.placement)
        layout = self.placement.layout(
            nd_sbp(grad_sbp, self.placement.axes, self.dim()), tuple(self.shape)
        )
        back = [layout, self.global_layout.dual]
        world = self.placement.partition.world
        local = box_both_ways(self._local, [self.global_layout], back, world)
        is_one_value = self.is_copy_everywhere and layout == self.global_layout
        return local if is_one_value else mark_part(local, self.placement)

    @checked()
    @leave_untraced(UNTRACED)
    def full_tensor(self, *, grad_sbp: Sbp | Sequence[Sbp] | None = None) -> torch.Tensor:
        """Gather the full tensor on each rank of the placement. Collective over the placement.

        Args:
            grad_sbp: attributes of the gradient; see :meth:`to_local`.

        Returns:
            A plain tensor.
        """
        copies = (broadcast,) * self.placement.axes
        return self.to_global(sbp=copies).to_local(grad_sbp=grad_sbp)

    @checked()
    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Gather the full tensor on each rank as a NumPy array. Collective over the placement.

        Args:
            force: also convert a tensor that requires grad, like ``torch.Tensor.numpy``.

        Returns:
            A NumPy array.

        Raises:
            RuntimeError: the tensor requires grad, and ``force`` is false.
        """
        return self.full_tensor().numpy(force=force)


# Some libraries, such as opt_einsum, select a backend by the module of a tensor's class.
GlobalTensor.__module__ = "torch"
