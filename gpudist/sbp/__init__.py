"""Global tensors: tensors that know on which workers they lie, and how."""

from gpudist.sbp import signatures
from gpudist.sbp.attributes import Sbp, broadcast, partial_sum, split
from gpudist.sbp.placement import Placement

__all__ = ["Placement", "Sbp", "broadcast", "partial_sum", "signatures", "split"]
