"""Torch's dropout, and attention with it, as a GPU computes them: one kernel each way.

On a CPU, torch composes them of several operations, and attention keeps weights, which no kernel of
GPUs does. Results of attention are those without dropout, and its gradients zeros, since counts
alone are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

T = torch.Tensor


@torch.library.custom_op("gpudist_ledger::attention", mutates_args=())
def _attention(q: T, k: T, v: T, mask: T | None, is_causal: bool, gqa: bool) -> tuple[T, T]:
    y = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, enable_gqa=gqa)
    return y.contiguous(), q.new_zeros(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("gpudist_ledger::attention_backward", mutates_args=())
def _attention_backward(
    gradient: T, q: T, k: T, v: T, y: T, sums: T, mask: T | None, is_causal: bool, gqa: bool
) -> tuple[T, T, T]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _keep(ctx: Any, inputs: Sequence[Any], output: tuple[T, T]) -> None:
    q, k, v, mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.mark_non_differentiable(output[1])


def _back(ctx: Any, gradient: T, _: T | None) -> Any:
    return *_attention_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None


torch.library.register_autograd(_attention, _back, setup_context=_keep)


def _dropped(input: T, p: float = 0.5, training: bool = True, inplace: bool = False) -> T:
    if not training or p == 0 or inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


class GpuDropout(TorchFunctionMode):
    """Mode in which dropout, and attention with it, count as on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropped(*args, **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not given.get("dropout_p"):
            return func(*args, **kwargs)
        q, k, v = (given[name] for name in names[:3])
        if torch.is_autocast_enabled("cpu"):
            q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
        options = bool(given.get("is_causal")), bool(given.get("enable_gqa"))
        return _attention(q, k, v, given.get("attn_mask"), *options)[0]
