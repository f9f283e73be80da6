"""The global tensor: a local tensor on each rank, and what all of them are together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpudist.checks.arguments import checked
from gpudist.sbp import methods
from gpudist.sbp.attributes import NdSbp, Sbp, broadcast, nd_sbp
from gpudist.sbp.boxing import box, declared, gradient_layout
from gpudist.sbp.layout import Layout
from gpudist.sbp.lies import Lies, lies, wrapped
from gpudist.sbp.placement import Placement
from gpudist.sbp.remembered import recalled
from gpudist.sbp.scope import Row, current_scope
from gpudist.sbp.unknown import place_of_call
from gpudist.world.partition import require_one_world


class GlobalTensor(torch.Tensor):
    """A tensor on a placement, one attribute for each of its axes.

    ``shape``, ``dtype`` and operators are those of the whole tensor. Made by
    :func:`gpudist.to_global`. Operators are collective over the placement; every rank of the world
    calls them, ranks outside it hold no cells.

    Its parts are ordinary tensors, which carry the graph of autograd; see the room's README.

    Attributes:
        placement: the ranks it lies on.
        sbp: how it lies along each axis of the placement.
    """

    _local: torch.Tensor
    _lies: Lies

    @classmethod
    def _wrap(
        cls, local: torch.Tensor, placement: Placement, sbp: NdSbp, shape: tuple[int, ...]
    ) -> GlobalTensor:
        """The global tensor whose part on this rank is ``local``: nothing is checked or copied."""
        return wrapped(cls, local, lies(placement, sbp, shape, local.dtype))

    @classmethod
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
            return method(*args, **kwargs)
        return recalled(GlobalTensor, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        raise NotImplementedError(
            f"{func}: reached a global tensor past its operators, which only Python calls; compute "
            "on its blocks: x.to_local()"
        )

    @property
    def placement(self) -> Placement:
        return self._lies.placement

    @property
    def sbp(self) -> NdSbp:
        return self._lies.sbp

    @property
    def global_layout(self) -> Layout:
        """Which cells each rank has."""
        return self._lies.layout

    def _on_axes_of(self, placement: Placement) -> GlobalTensor | None:
        """The same tensor on a placement of the same ranks that differs in axes of one rank alone.

        ``None`` if ``placement`` is another one.
        """
        if placement == self.placement:
            return self
        several = [[n for n in one.shape if n > 1] for one in (placement, self.placement)]
        if several[0] != several[1] or placement.partition.ranks != self.placement.partition.ranks:
            return None
        pairs = zip(self.placement.shape, self.sbp, strict=True)
        own = iter([one for n, one in pairs if n > 1])
        sbp = tuple(next(own) if n > 1 else broadcast for n in placement.shape)
        return self._wrap(self._local, placement, sbp, tuple(self.shape))

    @property
    def is_copy_everywhere(self) -> bool:
        """Whether each rank of the placement has the whole tensor."""
        return all(one == broadcast for one in self._lies.sbp)

    @checked()
    def like(self, local: torch.Tensor) -> GlobalTensor:
        """A global tensor that lies as this one does, of other parts."""
        return self._wrap(local, self.placement, self.sbp, tuple(self.shape))

    @checked()
    def to_global(
        self,
        placement: Placement | None = None,
        sbp: Sbp | Sequence[Sbp] | None = None,
        *,
        grad_sbp: Sbp | Sequence[Sbp] | None = None,
    ) -> GlobalTensor:
        """The same tensor with other attributes, or on another placement; see ``to_global``."""
        placement = self.placement if placement is None else placement
        require_one_world("to_global", self.placement.partition, placement.partition)
        if sbp is None and placement.axes == self.placement.axes:
            sbp = self.sbp
        target = placement.layout(nd_sbp(sbp or (), placement.axes, self.dim()), tuple(self.shape))
        world = placement.partition.world
        scope = current_scope()
        record = scope.record if scope is not None else None
        sent = record.sent_bytes() if record is not None else 0
        if grad_sbp is None:
            local = box(self._local, self.global_layout, target, world)
        else:
            passed = self.placement.layout(
                nd_sbp(grad_sbp, self.placement.axes, self.dim()), tuple(self.shape)
            )
            back = [gradient_layout(target), passed, gradient_layout(self.global_layout)]
            local = declared(self._local, [self.global_layout, target], back, world)
        if record is not None and scope is not None and self.global_layout != target:
            record.rows.append(
                Row(
                    place_of_call(scope)[0], "to_global", str(self.sbp), str(target.sbp),
                    self.numel(), record.sent_bytes() - sent, False, False,
                )
            )  # fmt: skip
        return self._wrap(local, placement, target.sbp, tuple(self.shape))

    @checked()
    def to_local(self, *, grad_sbp: Sbp | Sequence[Sbp] | None = None) -> torch.Tensor:
        """This rank's part: a block, a copy or a term; ``(0,)`` outside the placement.

        Args:
            grad_sbp: what the ranks' gradients of their parts are of the whole gradient; by default
                the dual of ``sbp``: of a copy, a term.

        Returns:
            An ordinary tensor with the graph of autograd, which shares memory with this one.
        """
        if grad_sbp is None:
            return self._local.view_as(self._local)
        given = self.placement.layout(
            nd_sbp(grad_sbp, self.placement.axes, self.dim()), tuple(self.shape)
        )
        back = [given, gradient_layout(self.global_layout)]
        return declared(self._local, [self.global_layout], back, self.placement.partition.world)

    @checked()
    def full_tensor(self, *, grad_sbp: Sbp | Sequence[Sbp] | None = None) -> torch.Tensor:
        """The whole tensor on each rank of the placement. Collective over it."""
        copies = (broadcast,) * self.placement.axes
        return self.to_global(sbp=copies).to_local(grad_sbp=grad_sbp)

    @checked()
    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """The whole tensor as an array on each rank of the placement. Collective over it.

        Raises:
            RuntimeError: it requires grad, and ``force`` is not given.
        """
        return self.full_tensor().numpy(force=force)


# Libraries choose by a tensor's module what computes with it, such as opt_einsum its backend.
GlobalTensor.__module__ = "torch"
