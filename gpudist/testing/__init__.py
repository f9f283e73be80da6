"""Run a function on every rank of a small world, and test that adjoints are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gpudist import errors
from gpudist.checks.arguments import Checked, check, checked
from gpudist.exchange import all_reduce
from gpudist.testing.rank_pool import GRACE_S, RankPool, RanksFailed
from gpudist.transport.loopback import LoopbackWorld
from gpudist.world import runtime
from gpudist.world.launch import deadline_of
from gpudist.world.partition import Partition

__all__ = ["DotTest", "assert_adjoint", "dot_test", "run_distributed"]


def run_distributed(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    transport: Literal["loopback", "gloo", "host"] = "loopback",
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(P_world, *args, **kwargs)`` on every rank of a new world of ``size`` ranks.

    On these ranks, ``gpudist.init()`` also returns ``P_world``.

    Args:
        fn: function to run; for processes, a function at the top level of a module, because they
            import it by name.
        size: number of ranks.
        transport: ``"loopback"`` for threads of this process; ``"gloo"`` or ``"host"`` for new
            processes.
        timeout: deadline of every wait between ranks, in seconds, above 0 and at most 1,000,000;
            the whole run may take 7 s more. Threads that have not ended by then are interrupted.
        args, kwargs: arguments of ``fn``; for processes, arguments and results are pickled.

    Returns:
        Results of all ranks, by rank.

    Cost:
        Loopback: milliseconds. Gloo: 0.1 s for 4 processes, and 2 s once for the server from which
        they are forked, which imports torch.

    Raises:
        Exception: the exception of the rank that failed first, not the exceptions it caused on
            others. For processes, its ``__cause__`` shows the traceback of every rank.
        PeerFailure: if a process died; the error names its rank.
        CollectiveTimeout: if time ran out; the error shows where each rank was.
        TransportError: if ``timeout`` is out of range.
        NotBuiltError: over loopback and host, if this installation has no native core.
    """
    timeout = deadline_of(timeout, "run_distributed")
    check(run_distributed, "run_distributed", (fn, size), {"transport": transport})
    if transport == "loopback":
        world = LoopbackWorld(size, timeout)
        return world.run(
            lambda wire: runtime.run_as_rank(fn, wire, args, kwargs), timeout + GRACE_S
        )
    if transport not in ("gloo", "host"):
        raise errors.ShapeError(f"transport is {transport!r}; use 'loopback', 'gloo' or 'host'")
    with RankPool(size, timeout) as pool:
        try:
            return pool.run(size, fn, args, kwargs, timeout + GRACE_S, transport)
        except RanksFailed as failed:
            assert failed.root.error is not None
            raise failed.root.error from failed


@checked()
def assert_adjoint(
    operator: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    P: Partition,
    tolerance: float = 1e-12,
) -> None:
    """Assert that the backward of a linear ``operator`` is its adjoint: ``<Fx, y> = <x, F*y>``.

    Collective over ``P``. The inner product is the sum over all workers of their tensors' inner
    products; ``y`` is random.

    Args:
        operator: linear operator, called with a copy of ``x`` that requires grad.
        x: this worker's input; a zero-volume placeholder if it has none.
        P: partition of all workers that take part.
        tolerance: largest allowed ``|<Fx,y> - <x,F*y>| / max(|Fx||y|, |x||F*y|)``; 1e-12 suits
            float64.

    Raises:
        AssertionError: on every rank alike, with both inner products, or naming a rank whose
            gradient does not have the shape and dtype of its input.
    """
    test = dot_test(operator, x, P)
    wrong = test.misfits
    assert not wrong, f"ranks {wrong}: the gradient does not have the input's shape and dtype"
    assert test.error <= tolerance, (
        f"<Fx,y> = {test.forward!r} but <x,F*y> = {test.adjoint!r}: relative difference "
        f"{test.error:.2e}, allowed {tolerance:.0e}"
    )


@dataclass(frozen=True)
class DotTest(Checked):
    """Two inner products that are equal if a backward is the adjoint of its forward.

    Attributes:
        forward: ``<Fx, y>``.
        adjoint: ``<x, F*y>``.
        scale: the larger of ``|Fx||y|`` and ``|x||F*y|``.
        misfits: ranks whose gradient does not have the shape and dtype of their input.
    """

    forward: float
    adjoint: float
    scale: float
    misfits: tuple[int, ...]

    @property
    def error(self) -> float:
        """Relative difference of the inner products."""
        difference = abs(self.forward - self.adjoint)
        return difference / self.scale if difference else 0.0


@checked()
def dot_test(
    operator: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, P: Partition
) -> DotTest:
    """Compute the inner products that :func:`assert_adjoint` compares.

    Collective over ``P``.

    Args:
        operator, x, P: see :func:`assert_adjoint`.

    Returns:
        The inner products, the same on every rank.
    """
    x = x.detach().clone().requires_grad_()
    image = operator(x)
    y = torch.randn_like(image)
    (adjoint,) = torch.autograd.grad(image, x, y, allow_unused=True)
    fits = adjoint is not None and adjoint.shape == x.shape and adjoint.dtype == x.dtype
    if adjoint is None or not fits:
        adjoint = torch.zeros_like(x)

    def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.detach().reshape(-1).to(wide), b.detach().reshape(-1).to(wide)
        return torch.vdot(a, b).real.to(torch.float64)

    misfits = torch.zeros(P.size, dtype=torch.float64, device=x.device)
    misfits[P.rank or 0] = not fits
    products = [dot(image, y), dot(x, adjoint)]
    norms = [dot(t, t) for t in (image, y, x, adjoint)]
    sums = all_reduce(torch.cat([torch.stack(products + norms), misfits]), P)
    forward, backward = sums[0].item(), sums[1].item()
    image_norm, y_norm, x_norm, adjoint_norm = sums[2:6].sqrt().tolist()
    scale = max(image_norm * y_norm, x_norm * adjoint_norm)
    return DotTest(forward, backward, scale, tuple(sums[6:].nonzero().flatten().tolist()))
