"""What would be wrong on blocks is refused, by path and line, and not computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpudist import ConversionError, distribute, sequential
from gpudist.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed


class Softmax(nn.Module):
    """A function of torch in a module of the user's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, 0)


class Calls(nn.Module):
    """A forward that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("offset", torch.zeros(()))
        self.softmax = Softmax()

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _without_gradient(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
    return F.max_pool2d(y, 2)


FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "reshape": (lambda m, x: x.view(2, -1, 6), r"inner: view at .*test_refusals.py:\d+: only a"),
    "whole flatten": (lambda m, x: x.flatten(), "flattened together with the batch"),
    "mean over a split dim": (lambda m, x: x.mean(3), "the mean over dims"),
    "mean of all": (lambda m, x: x.mean(), "the mean over dims"),
    "sum": (lambda m, x: x.sum((2, 3)), r"dims \[2, 3\] are reduced"),
    "concatenation": (lambda m, x: torch.cat([x, x], 3), "join along dim 3"),
    "concatenation of two": (
        lambda m, x: torch.cat([x, F.pad(x, (1, 1)).permute(0, 1, 3, 2)], 1),
        r"different partitions, \[\[1, 1, 1, 2\], \[1, 1, 2, 1\]\], are concatenated",
    ),
    "sum of two": (lambda m, x: x + x.transpose(2, 3), "combines tensors on different part"),
    "matrix product": (lambda m, x: x @ x, "matmul at .*: it is not known to be right on blocks"),
    "convolution": (lambda m, x: F.conv2d(x, m.conv.weight), "it uses conv.weight"),
    "cells": (lambda m, x: x[..., 1:], "cells are taken along dim 3, which is split"),
    "number of cells": (lambda m, x: x / x.shape[3], "size of a block is used as a number"),
    "own random numbers": (lambda m, x: x + torch.randn_like(x), "randn_like at .*: it is not"),
    "parameter with cells": (lambda m, x: x * m.scale, r"of shape \[6\] is whole on every worker"),
    "concatenation with a mean": (
        lambda m, x: torch.cat([x, x.mean((2, 3), keepdim=True)], 1),
        "pooled to one cell is concatenated",
    ),
    "function of parameters": (
        lambda m, x: x * F.softmax(m.scale, 0).sum(),
        "neither a parameter nor a buffer and depends on no input",
    ),
    "indices": (lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0], "with_indices at"),
    "adaptive indices": (
        lambda m, x: F.adaptive_max_pool2d(x, 2, True)[0],
        "adaptive_max_pool2d_with_indices at .*: it is not known",
    ),
    "torch's own adaptive indices": (
        lambda m, x: torch.adaptive_max_pool1d(x.flatten(1, 2), 2)[0],
        "adaptive_max_pool1d at .*: it is not known to be right on blocks",
    ),
    "dropout always": (lambda m, x: F.dropout(x, 0.5), "dropout with training=True"),
    "mode": (lambda m, x: x * 2 if m.training else x, "other steps in training"),
    "number by mode": (lambda m, x: x * (2 if m.training else 3), "others in training than in"),
    "no gradient": (_without_gradient, "changes the grad mode"),
    "no function of the input": (lambda m, x: 3, "^the output of the module does not depend on"),
    "no cell of the input": (lambda m, x: (3, m.offset), "^the output of .* on the cells"),
    "parameter given out": (lambda m, x: [x, m.scale], "^the output of the module has a parameter"),
    "size given out": (lambda m, x: (x, x.shape[1]), "^the output of the module has a size"),
    "sizes given out": (lambda m, x: [x, x.shape], "^the output of the module has a size"),
    "number given out": (lambda m, x: [x, 2 * x.shape[0]], "^the output of the module has a size"),
    "range given out": (lambda m, x: (x, slice(x.shape[3])), "^the output of the .* has a size"),
    "number of dims": (lambda m, x: x.sum(x.dim() - 1), "sub at .*: its arguments depend on no in"),
    "parameter and a size": (
        lambda m, x: x * (m.scale / x.shape[1]),
        "div at .*: it computes with parameters or buffers alone",
    ),
    "module of a parameter": (
        lambda m, x: x * m.softmax(m.scale).sum(),
        r"inner\.softmax: softmax at .*: it is called on a parameter or buffer",
    ),
    "module of two tensors": (
        lambda m, x: m.softmax(x, x),
        r"inner\.softmax: too many positional arguments",
    ),
    "layer of two tensors": (
        lambda m, x: m.conv(x, x),
        r"inner\.conv: called with 2 arguments; it needs one tensor",
    ),
    "other dtype": (
        lambda m, x: x.view(torch.int32),
        r"view at .*: a reshape to \[torch.int32\] is not known to be right",
    ),
    "attribute": (lambda m, x: x.T, "getattr at .*: the attribute T of a tensor is not supported"),
    "new dim": (lambda m, x: x[:, None], "getitem at .*: the index None is not supported"),
    "cells under a mask": (lambda m, x: x[x > 0], "getitem at .*: the index .* is not supported"),
    "chunks": (lambda m, x: x.chunk(2, 3), r"dim 3 of \[1, 1, 1, 2\] is cut up, which is split"),
    "pieces": (lambda m, x: x.split(2, 3), r"dim 3 of \[1, 1, 1, 2\] is cut up, which is split"),
    "lines": (lambda m, x: x.unbind(3), r"dim 3 of \[1, 1, 1, 2\] is cut up, which is split"),
    "dim as two": (lambda m, x: x.unflatten(3, (2, -1)), "is unflattened, which is split"),
    "mean with channels last": (
        lambda m, x: x.mean((2, 3), keepdim=True).permute(0, 2, 3, 1),
        "permute at .*: a tensor that was pooled to one cell is permuted",
    ),
    "smooth interpolation": (
        lambda m, x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
        "interpolate at .*: antialias is not supported",
    ),
    "interpolation of channels": (
        lambda m, x: F.interpolate(x, size=x.shape[1:]),
        "interpolate at .*: the size is of another number of dims",
    ),
    "padded channels": (
        lambda m, x: F.pad(x, (1, 1, 1, 1, 1, 1)),
        r"pad at .*: padding \[1, 1, 1, 1, 1, 1\] of mode 'constant' is not supported",
    ),
    "loop over cells": (lambda m, x: [row for row in x], "cannot be traced"),
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "unknown": (lambda: nn.LSTM(6, 6), "inner: torch.nn.LSTM is not supported"),
    "norm of a neighbourhood": (lambda: nn.LocalResponseNorm(2), "LocalResponseNorm is not"),
    "pool with indices": (lambda: nn.MaxPool2d(2, return_indices=True), "return_indices"),
    "features split": (
        lambda: nn.Linear(6, 6),
        "inner: its input on .* is split along",
    ),
    "wrong dims": (lambda: nn.Conv1d(4, 4, 1), "inner: DistributedConv1d: P_x has shape"),
    "flatten with batch": (lambda: nn.Flatten(0), "inner: dims are flattened together"),
}


def refuse(P_world: Partition, inner: nn.Module, message: str) -> None:
    network = nn.Sequential()
    network.add_module("inner", inner)
    with pytest.raises(ConversionError, match=message):
        distribute(network, grid(P_world, [1, 1, 1, 2]))


@pytest.mark.parametrize("case", FUNCTIONS)
@distributed(ranks=2, transports=["loopback"])
def test_function_is_refused(P_world: Partition, case: str) -> None:
    function, message = FUNCTIONS[case]
    refuse(P_world, Calls(function), message)


@pytest.mark.parametrize("case", LAYERS)
@distributed(ranks=2, transports=["loopback"])
def test_layer_is_refused(P_world: Partition, case: str) -> None:
    make, message = LAYERS[case]
    refuse(P_world, make(), message)


@distributed(ranks=2, transports=["loopback"])
def test_tree_is_refused(P_world: Partition) -> None:
    first, second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    second.weight = first.weight
    refuse(P_world, nn.Sequential(first, second), "inner.1.weight: shared with inner.0.weight")
    first = nn.Conv2d(4, 4, 1)
    first.register_forward_hook(lambda *_: None)
    refuse(P_world, first, "inner: it has hooks")
    conv = nn.Conv2d(4, 4, 1)
    refuse(
        P_world,
        nn.Sequential(conv, nn.Flatten(), conv),
        "inner.2: called with .*, but as 'inner.0'",
    )
    with pytest.raises(ConversionError, match="not what distribute"):
        sequential(nn.Linear(2, 2))
