"""Methods of global tensors that concern memory: copies, NumPy's arrays, storage and pickles."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpudist.sbp.methods import entry, requires_grad, set_requires_grad

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor

T = torch.Tensor


@entry(T.__deepcopy__)
def deep_copy(x: GlobalTensor, memo: dict[int, Any]) -> GlobalTensor:
    if id(x) in memo:
        return memo[id(x)]
    if not x._local.is_leaf:
        raise RuntimeError(
            "only global tensors that are leaves of the graph can be deep-copied; copy x.detach()"
        )
    copy_with = getattr(x, "with_cells", partial(leaf_of, x))
    memo[id(x)] = copy = copy_with(x._local.detach().clone())
    return copy


def leaf_of(x: GlobalTensor, local: torch.Tensor) -> GlobalTensor:
    """Return a leaf with the layout and attributes of ``x`` and the part ``local``."""
    copy = x.like(local)
    set_requires_grad(copy, requires_grad(x))
    for name in ("_is_param", "_is_buffer", "persistent"):
        if name in x.__dict__:
            setattr(copy, name, x.__dict__[name])
    return copy


@entry(T.__array__)
def as_array(x: GlobalTensor, dtype: Any = None) -> np.ndarray[Any, Any]:
    """Gather the full tensor on each rank as a NumPy array. Collective over the placement."""
    array = x.numpy()
    return array if dtype is None else array.astype(dtype, copy=False)


@entry(T.__array_wrap__)
def from_array(x: GlobalTensor, array: np.ndarray[Any, Any], *_: object) -> torch.Tensor:
    """Return the result of a NumPy function, which every rank has in full, as a plain tensor."""
    return torch.as_tensor(array)


@entry(T.record_stream)
def record_stream(x: GlobalTensor, stream: Any) -> None:
    x._local.record_stream(stream)


@entry(T.pin_memory)
def pin_memory(x: GlobalTensor, *args: Any) -> GlobalTensor:
    return x.like(x._local.pin_memory(*args))


@entry(T.cuda)
def to_cuda(x: GlobalTensor, *_: object, **__: object) -> Any:
    return x.to("cuda")


def _refuse_memory(name: str, x: GlobalTensor, *_: object, **__: object) -> Any:
    raise NotImplementedError(
        f"{name} concerns a tensor's memory, and a global tensor has a part of it on each rank; "
        f"use {name} of x.to_local(), or make a new tensor"
    )


for _name in (
    *("resize", "resize_as", "resize_", "resize_as_", "share_memory_", "storage"),
    *("untyped_storage", "_typed_storage", "__dlpack__", "__dlpack_device__", "const_data_ptr"),
):
    # torch 2.11 has no const_data_ptr.
    if hasattr(T, _name):
        entry(getattr(T, _name))(partial(_refuse_memory, _name))


@entry(T.__reduce_ex__)
def refuse_pickle(x: GlobalTensor, protocol: object) -> Any:
    raise NotImplementedError(
        "a global tensor cannot be pickled; pickle x.to_local(), this rank's part, or "
        "x.full_tensor(), the whole tensor. To save an optimizer's state, use "
        "gpudist.checkpoint.save or gpudist.checkpoint.full_optimizer_state_dict"
    )
