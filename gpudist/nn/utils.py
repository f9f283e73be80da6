"""Counterparts of torch.nn.utils for the parameters of distributed layers."""

from __future__ import annotations

import math
from typing import Any

import torch

from gpudist.checks.arguments import check
from gpudist.errors import ShapeError
from gpudist.exchange import all_reduce
from gpudist.nn.affine.local_conv import use_onednn
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, placements
from gpudist.world.partition import Partition

__all__ = ["clip_grad_norm_", "use_onednn"]


@torch.no_grad()
def clip_grad_norm_(
    module: torch.nn.Module,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients of ``module`` in place so that their global norm is at most ``max_norm``.

    The norm equals the gradient norm of the sequential network: each cell counts once, however
    many workers hold it. Collective over the world, including workers without parameters.

    Args:
        module: tree of layers, distributed or not. The parameters and gradients of layers that are
            not distributed must be the same on all ranks.
        max_norm: maximum norm of all gradients together.
        norm_type: order of the norm, above 0; infinity, or ``"inf"``, for the maximum.
        error_if_nonfinite: raise an error if a gradient is infinite or NaN.
        foreach: scale many gradients in one call, as in torch; by default where possible.

    Returns:
        Norm before scaling, bitwise equal on all ranks, in the widest dtype of the parameters.

    Cost:
        One all-reduce of two numbers.

    Raises:
        ShapeError: ``module`` is not a module (parameters alone do not show which workers hold
            them), or ``norm_type`` is not above 0.
        RuntimeError: on all ranks, if ``error_if_nonfinite`` is set and the norm is not finite, as
            in torch.
    """
    if not isinstance(module, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShapeError(
            "clip_grad_norm_: got parameters, which do not show which of their cells other "
            "workers also hold; pass the module"
        )
    arguments = module, max_norm, norm_type, error_if_nonfinite, foreach
    check(clip_grad_norm_, "clip_grad_norm_", arguments, {})
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
    placed = placements(module)
    P_world = next((placement.P.world for placement in placed.values()), None)
    dtype = torch.float32
    norms: list[torch.Tensor] = []
    for name, parameter in module.named_parameters():
        dtype = torch.promote_types(dtype, parameter.dtype)
        gradient: Any = parameter.grad
        if hasattr(gradient, "global_layout"):
            gradient = gradient.to_local()
        if gradient is None or gradient.numel() == 0 or not _counts(placed.get(name), P_world):
            continue
        wide = torch.promote_types(torch.float32, gradient.dtype)
        norms.append(torch.linalg.vector_norm(gradient, order, dtype=wide).double())
    device = P_world.device if P_world is not None else None
    own_norms = (
        torch.stack([norm.to(device) for norm in norms]) if norms else torch.zeros(1).double()
    )
    return _combined(own_norms.to(device), order, P_world).to(dtype)


def _combined(norms: torch.Tensor, order: float, P_world: Partition | None) -> torch.Tensor:
    if P_world is None:
        return torch.linalg.vector_norm(norms, order)
    if not math.isinf(order):
        return all_reduce(norms.pow(order).sum(), P_world).pow(1 / order)
    # A maximum may ignore NaN.
    is_wrong = norms.isnan()
    largest = torch.stack([norms.masked_fill(is_wrong, 0).max(), is_wrong.any().double()])
    largest, wrong = all_reduce(largest, P_world, "max").unbind()
    return largest.masked_fill(wrong > 0, math.nan)


def _counts(placement: ParameterPlacement | None, P_world: Partition | None) -> bool:
    if placement is None:
        return P_world is None or P_world.rank == 0
    return placement.is_first_copy
