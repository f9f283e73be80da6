"""Multi-head attention, composed of projections and attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpudist.nn.attention.blockwise import attention_scores
from gpudist.nn.attention.multihead import project
from gpudist.sbp.registry import compose


@compose(F.multi_head_attention_forward)
def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute multi-head attention with a separate dim for heads, so that other splits remain."""
    if static_k is not None or static_v is not None:
        raise NotImplementedError(
            "multi_head_attention_forward of global tensors does not support static_k and "
            "static_v; leave them out"
        )
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    is_batched = F._mha_shape_check(  # pyright: ignore
        query, key, value, key_padding_mask, attn_mask, num_heads
    )
    masks = (query.shape[0], key.shape[0])
    if attn_mask is not None and attn_mask.dim() == 3:
        masks = ((query.shape[1] if is_batched else 1) * num_heads, *masks)
    rows = [x for x in (bias_k, bias_v) if x is not None and x.shape != (1, 1, query.shape[-1])]
    if (attn_mask is not None and attn_mask.shape != masks) or rows:
        raise RuntimeError(
            f"multi_head_attention_forward: a mask has the shape {list(masks)} here, and bias_k "
            f"and bias_v have {[1, 1, query.shape[-1]]}"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise RuntimeError(
            f"key shape {list(key.shape)} does not match value shape {list(value.shape)}"
        )
    if not is_batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights = None
    if use_separate_proj_weight:
        weights = q_proj_weight, k_proj_weight, v_proj_weight
    q, k, v = project((query, key, value), in_proj_weight, weights, in_proj_bias)
    if bias_k is not None and bias_v is not None:
        k, v = (_with_row(x, row.expand(1, *x.shape[1:])) for x, row in ((k, bias_k), (v, bias_v)))
    if add_zero_attn:
        k, v = (_with_row(x, x.new_zeros((1, *x.shape[1:]))) for x in (k, v))
    more = k.shape[0] - key.shape[0]
    if more:
        attn_mask = None if attn_mask is None else F.pad(attn_mask, (0, more))
        key_padding_mask = None if key_padding_mask is None else F.pad(key_padding_mask, (0, more))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, query, num_heads)
    dropout_p = dropout_p if training else 0.0
    shares = None
    if need_weights:
        shares = F.softmax(attention_scores(q, k, mask), -1)
        shares = F.dropout(shares, dropout_p) if dropout_p > 0 else shares
        y = shares @ v
        shares = shares.mean(1) if average_attn_weights else shares
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
    y = F.linear(y.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    if not is_batched:
        y, shares = y.squeeze(1), None if shares is None else shares.squeeze(0)
    return y, shares


def _with_row(x: Tensor, row: Tensor) -> Tensor:
    return torch.cat([x, row])


def _mask(mask: Tensor | None, padding: Tensor | None, query: Tensor, heads: int) -> Tensor | None:
    """Return the combined mask that is added to the scores ``[samples, heads, queries, keys]``."""
    if mask is not None:
        mask = mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask
        mask = _as_added(mask, query)
    if padding is not None:
        hidden = _as_added(padding, query).unsqueeze(1).unsqueeze(1)
        mask = hidden if mask is None else mask + hidden
    return mask


def _as_added(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf)
