"""Torch's transformer layers as compositions of their children, without torch's fast paths."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from gpudist.convert.values import Whole
from gpudist.convert.weights import copy_weights
from gpudist.errors import ConversionError
from gpudist.nn import DistributedMultiheadAttention
from gpudist.nn.attention import heads_partition
from gpudist.partition import CartesianPartition


class _Composition(torch.nn.Module):
    """The children of a layer of torch, under their names, called one after the other."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._parameters, self._modules = layer._parameters, dict(layer._modules)
        self.training = layer.training
        plain = ("norm_first", "activation", "norm")
        self.__dict__ |= {name: layer.__dict__[name] for name in plain if name in layer.__dict__}

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def _fed_forward(self, x: torch.Tensor, last: torch.nn.Module) -> torch.Tensor:
        hidden = self.dropout(self.activation(self.linear1(x)))
        return last(self.linear2(hidden))


class EncoderLayer(_Composition):
    """``torch.nn.TransformerEncoderLayer``."""

    def forward(
        self,
        src: Any,
        src_mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: Any = False,
    ) -> Any:
        def attended(x: Any) -> Any:
            y, _ = self.self_attn(
                x, x, x, attn_mask=src_mask, key_padding_mask=src_key_padding_mask,
                need_weights=False, is_causal=is_causal,
            )  # fmt: skip
            return self.dropout1(y)

        if self.norm_first:
            x = src + attended(self.norm1(src))
            return x + self._fed_forward(self.norm2(x), self.dropout2)
        x = self.norm1(src + attended(src))
        return self.norm2(x + self._fed_forward(x, self.dropout2))


class Encoder(_Composition):
    """``torch.nn.TransformerEncoder``."""

    def forward(
        self, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None
    ) -> Any:
        x = src
        for layer in self.layers:
            x = layer(
                x,
                src_mask=mask,
                src_key_padding_mask=src_key_padding_mask,
                is_causal=bool(is_causal),
            )
        return x if self.norm is None else self.norm(x)


class DecoderLayer(_Composition):
    """``torch.nn.TransformerDecoderLayer``."""

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: Any = False,
        memory_is_causal: Any = False,
    ) -> Any:
        def attended(x: Any) -> Any:
            y, _ = self.self_attn(
                x, x, x, attn_mask=tgt_mask, key_padding_mask=tgt_key_padding_mask,
                need_weights=False, is_causal=tgt_is_causal,
            )  # fmt: skip
            return self.dropout1(y)

        def attended_memory(x: Any) -> Any:
            y, _ = self.multihead_attn(
                x, memory, memory, attn_mask=memory_mask, need_weights=False,
                key_padding_mask=memory_key_padding_mask, is_causal=memory_is_causal,
            )  # fmt: skip
            return self.dropout2(y)

        if self.norm_first:
            x = tgt + attended(self.norm1(tgt))
            x = x + attended_memory(self.norm2(x))
            return x + self._fed_forward(self.norm3(x), self.dropout3)
        x = self.norm1(tgt + attended(tgt))
        x = self.norm2(x + attended_memory(x))
        return self.norm3(x + self._fed_forward(x, self.dropout3))


class Decoder(_Composition):
    """``torch.nn.TransformerDecoder``."""

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: Any = None,
        memory_is_causal: Any = False,
    ) -> Any:
        x = tgt
        for layer in self.layers:
            x = layer(
                x,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=bool(tgt_is_causal),
                memory_is_causal=memory_is_causal,
            )
        return x if self.norm is None else self.norm(x)


COMPOSITIONS: dict[type[torch.nn.Module], type[_Composition]] = {
    torch.nn.TransformerEncoderLayer: EncoderLayer,
    torch.nn.TransformerEncoder: Encoder,
    torch.nn.TransformerDecoderLayer: DecoderLayer,
    torch.nn.TransformerDecoder: Decoder,
}


def converted_attention(
    layer: torch.nn.MultiheadAttention, replicate_parameters: bool, args: Any, kwargs: Any
) -> tuple[torch.nn.Module, CartesianPartition]:
    """The distributed layer, and the partition of its output.

    Args:
        layer: of torch.
        replicate_parameters: every worker holds the parameters.
        args, kwargs: values of the call.

    Raises:
        ConversionError: the layer or the call has what is not supported.
    """
    given: Any = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
    P_x = given["query"]
    if any(given[name] != P_x for name in ("query", "key", "value")):
        raise ConversionError("query, key and value are tensors on different partitions")
    if not isinstance(P_x, CartesianPartition):
        raise ConversionError("the query is no tensor of the input")
    if given.get("need_weights") and "need_weights" in kwargs:
        raise ConversionError("the weights are split over workers; pass need_weights=False")
    if given.get("attn_mask") is not None and given.get("is_causal") is not True:
        raise ConversionError("of masks only the causal one is supported; pass is_causal=True")
    _require_padding(given.get("key_padding_mask"), P_x, layer.batch_first)
    if layer.bias_k is not None or layer.add_zero_attn or not layer._qkv_same_embed_dim:
        raise ConversionError("add_bias_kv, add_zero_attn, kdim and vdim are not supported")
    workers = heads_partition(P_x, layer.batch_first).shape[2] if P_x.dim == 3 else 1
    new = DistributedMultiheadAttention(
        P_x,
        layer.embed_dim,
        layer.num_heads,
        layer.dropout,
        layer.in_proj_bias is not None,
        batch_first=layer.batch_first,
        device=P_x.device,
        dtype=layer.in_proj_weight.dtype,
        # Torch's kernels on whole sequences, where all workers get as many heads.
        exchange="ring" if layer.num_heads % workers else "all_to_all",
        replicate_parameters=replicate_parameters,
    )
    copy_weights(layer, new)
    return new.train(layer.training), P_x


def _require_padding(padding: Any, P_x: CartesianPartition, batch_first: bool) -> None:
    if padding is None:
        return
    if isinstance(padding, Whole) or not isinstance(padding, CartesianPartition):
        raise ConversionError("key_padding_mask is no tensor that follows from the input")
    P_heads = heads_partition(P_x, batch_first)
    if padding.ranks != P_heads.ranks or padding.shape != (P_heads.shape[0], P_heads.shape[2]):
        raise ConversionError(
            f"key_padding_mask is on a partition of shape {list(padding.shape)}, which does not "
            f"cut it as {list(P_x.shape)} cuts the keys"
        )
