"""What torch.nn.utils does to the parameters of a network, for those of distributed layers."""

from __future__ import annotations

import math

import torch

from gpudist.checks.arguments import check
from gpudist.errors import ShapeError
from gpudist.exchange import all_reduce
from gpudist.nn.parameters.placement import Placement, placements
from gpudist.world.partition import Partition


@torch.no_grad()
def clip_grad_norm_(
    module: torch.nn.Module,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients of ``module`` in place so that their global norm is at most ``max_norm``.

    The norm is that of the gradients of the sequential network: every cell counts once, however
    many workers hold it. Collective over the world, workers without parameters included.

    Args:
        module: a tree of layers, distributed or not; of the latter, every rank holds the same
            parameters and gradients.
        max_norm: of all gradients together.
        norm_type: order of the norm, above 0; infinity, or ``"inf"``, for the maximum.
        error_if_nonfinite: refuse gradients that are infinite or no number.
        foreach: scale many gradients in one call; as torch's, where that is possible unless given.

    Returns:
        The norm before, bitwise equal on all ranks, in the widest dtype of the parameters.

    Cost:
        One all-reduce of two numbers.

    Raises:
        ShapeError: ``module`` is no module (parameters alone do not tell who holds them), or
            ``norm_type`` is not above 0.
        RuntimeError: on all ranks, with ``error_if_nonfinite``, as torch's.
    """
    if not isinstance(module, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShapeError(
            "clip_grad_norm_: give the module instead of its parameters; these do not tell which "
            "of their cells other workers hold too"
        )
    given = module, max_norm, norm_type, error_if_nonfinite, foreach
    check(clip_grad_norm_, "clip_grad_norm_", given, {})
    order = _order_of(norm_type)
    total = _norm(module, order)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    torch.nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, total, foreach)
    return total


def _order_of(norm_type: float | str) -> float:
    try:
        order = float(norm_type)
    except ValueError:
        order = 0.0
    if not order > 0:
        raise ShapeError(
            f"clip_grad_norm_: norm_type is {norm_type!r}; it must be above 0, or 'inf'"
        )
    return order


def _norm(module: torch.nn.Module, order: float) -> torch.Tensor:
    """The norm of all gradients, each cell counted once."""
    placed = placements(module)
    P_world = next((placement.P.world for placement in placed.values()), None)
    dtype = torch.float32
    norms: list[torch.Tensor] = []
    for name, parameter in module.named_parameters():
        dtype = torch.promote_types(dtype, parameter.dtype)
        gradient = parameter.grad
        if gradient is None or gradient.numel() == 0 or not _counts(placed.get(name), P_world):
            continue
        wide = torch.promote_types(torch.float32, gradient.dtype)
        norms.append(torch.linalg.vector_norm(gradient, order, dtype=wide).double())
    device = P_world.device if P_world is not None else None
    own = torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1).double()
    return _combined(own.to(device), order, P_world).to(dtype)


def _combined(norms: torch.Tensor, order: float, P_world: Partition | None) -> torch.Tensor:
    """The norm of what has ``norms`` on all workers."""
    if P_world is None:
        return torch.linalg.vector_norm(norms, order)
    if not math.isinf(order):
        return all_reduce(norms.pow(order).sum(), P_world).pow(1 / order)
    # A maximum may pass over what is no number.
    is_wrong = norms.isnan()
    largest = torch.stack([norms.masked_fill(is_wrong, 0).max(), is_wrong.any().double()])
    largest, wrong = all_reduce(largest, P_world, "max").unbind()
    return largest.masked_fill(wrong > 0, math.nan)


def _counts(placement: Placement | None, P_world: Partition | None) -> bool:
    """This worker is the first of those that hold the same cells."""
    if placement is None:
        return P_world is None or P_world.rank == 0
    return placement.is_first_copy
