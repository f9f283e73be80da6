"""Former name of the repartition."""

from gpudist.compat.distdl.nn.repartition import Repartition as DistributedTranspose

__all__ = ["DistributedTranspose"]
