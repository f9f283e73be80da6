"""Methods of global tensors that read their values: Python's numbers, lists and texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gpudist.errors import PartitionError
from gpudist.geometry.layout import partial_sum
from gpudist.sbp import views
from gpudist.sbp.methods import entry

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor

T = torch.Tensor


def _value(x: GlobalTensor) -> torch.Tensor:
    """Return the full tensor; its values exist on the ranks of the placement alone.

    Collective over the placement, unless the tensor is a copy on each rank.

    Raises:
        PartitionError: this rank is outside the placement.
    """
    if not x.placement.active:
        raise PartitionError(
            f"this rank has no cells of a global tensor of shape {list(x.shape)} on "
            f"{x.placement!r}, so it cannot read its value; move it to a placement of all ranks "
            "first, with to_global"
        )
    return x.full_tensor().detach()


def _convert_value(convert: Callable[[torch.Tensor], Any], x: GlobalTensor) -> Any:
    return convert(_value(x))


_CONVERSIONS: dict[Callable[[torch.Tensor], Any], tuple[Any, ...]] = {
    T.item: (T.item,),
    T.tolist: (T.tolist,),
    bool: (T.__bool__, T.__nonzero__, T.is_nonzero, torch.is_nonzero),  # pyright: ignore
    float: (T.__float__,),
    complex: (T.__complex__,),
    int: (T.__int__, T.__index__, T.__long__),  # pyright: ignore
}
for _convert, _functions in _CONVERSIONS.items():
    entry(*_functions)(partial(_convert_value, _convert))


@entry(T.__repr__, T.__str__)
def text(x: GlobalTensor, **_: object) -> str:
    """Return a text with the global attributes and this rank's part, without communication."""
    kind = "Parameter" if getattr(x, "_is_param", False) else "GlobalTensor"
    facts = f"shape={list(x.shape)}, sbp={x.sbp!r}, placement={x.placement!r}, dtype={x.dtype}"
    is_outdated = views.is_outdated(x)
    # To compute the cells of an outdated view would communicate.
    local = views.source_of(x)._local  # pyright: ignore[reportAttributeAccessIssue]
    if local.requires_grad:
        node = None if is_outdated else local.grad_fn
        facts += ", requires_grad=True" if node is None else f", grad_fn=<{node.name()}>"
    index = x.placement.partition.index
    if index is None:
        return f"{kind}({facts}, no cells on this rank)"
    bounds = x.global_layout.box(index).slices
    cells = ", ".join(f"{bound.start}:{bound.stop}" for bound in bounds)
    part = "copy" if x.is_copy_everywhere else "term" if partial_sum in x.sbp else "block"
    cells = "not computed yet" if is_outdated else f"[{cells}]:\n{local.detach()!r}"
    return f"{kind}({facts}, this rank's {part} {cells})"


@entry(T.__format__)
def format_tensor(x: GlobalTensor, spec: str) -> str:
    return format(_value(x).item(), spec) if spec and x.dim() == 0 else text(x)
