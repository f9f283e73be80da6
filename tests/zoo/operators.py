"""Operators that torchvision lacks without the CUDA libraries that its wheel is linked with."""

from __future__ import annotations

import importlib.util

import torch

_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: list[torch.library.Library] = []


def declare_missing_operators() -> None:
    """Declare the two operators that torchvision looks up when it is imported.

    The wheel on PyPI cannot load its operators beside a torch for the CPU. No network of the zoo
    calls one.
    """
    if (
        torch.version.cuda is not None
        or _library
        or importlib.util.find_spec("torchvision") is None
    ):
        return
    _library.append(torch.library.Library("torchvision", "DEF"))
    for schema in _MISSING:
        _library[0].define(schema)
