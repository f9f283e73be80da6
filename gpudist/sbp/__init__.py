"""Global tensors: tensors with a placement and a layout on it."""

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.sbp import signatures
from gpudist.sbp.dtensor import from_dtensor, to_dtensor
from gpudist.sbp.explain import explain
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.layers import call_layer
from gpudist.sbp.placement import Placement
from gpudist.sbp.to_global import install_methods, to_global
from gpudist.sbp.typed import to_typed_local

__all__ = [
    "GlobalTensor",
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
    "to_global",
    "to_typed_local",
]
