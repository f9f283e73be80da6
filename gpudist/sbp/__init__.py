"""Global tensors: tensors with a placement and a layout on it."""

from typing import TYPE_CHECKING, NoReturn

from gpudist.checks.hints import MissingName as _MissingName
from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.sbp import (
    backward_hooks as backward_hooks,
    checkpointing as checkpointing,
    signatures,
    values as values,
)
from gpudist.sbp.dtensor import from_dtensor, to_dtensor
from gpudist.sbp.explain import explain
from gpudist.sbp.global_tensor import GlobalTensor as GlobalTensor
from gpudist.sbp.layers import call_layer
from gpudist.sbp.placement import Placement
from gpudist.sbp.to_global import install_methods, to_global as to_global
from gpudist.sbp.typed import to_typed_local

# GlobalTensor and to_global are public in gpudist.
__all__ = [
    "Placement",
    "Sbp",
    "broadcast",
    "call_layer",
    "explain",
    "from_dtensor",
    "install_methods",
    "partial_sum",
    "signatures",
    "split",
    "to_dtensor",
    "to_typed_local",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise _MissingName(__name__, name)
