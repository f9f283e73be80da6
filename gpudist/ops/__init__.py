"""Linear operators on distributed tensors, one a file: a function and a module each.

The functions that move data take NumPy and CuPy arrays as well, and return the same kind. Arrays
take no part in autograd.
"""

from gpudist.ops.all_gather import AllGather, SumScatter, all_gather, sum_scatter
from gpudist.ops.all_sum_reduce import AllSumReduce, all_sum_reduce
from gpudist.ops.broadcast import Broadcast, broadcast
from gpudist.ops.gather import Gather, Scatter, gather, scatter
from gpudist.ops.halo_exchange import HaloExchange, halo_exchange
from gpudist.ops.memory import (
    add,
    add_adjoint,
    clear,
    copy,
    copy_adjoint,
    move,
    move_adjoint,
)
from gpudist.ops.operator import zero_volume_tensor
from gpudist.ops.repartition import Repartition, repartition
from gpudist.ops.send_recv import SendRecv, send_recv
from gpudist.ops.sum_reduce import SumReduce, sum_reduce

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "Gather",
    "HaloExchange",
    "Repartition",
    "Scatter",
    "SendRecv",
    "SumReduce",
    "SumScatter",
    "add",
    "add_adjoint",
    "all_gather",
    "all_sum_reduce",
    "broadcast",
    "clear",
    "copy",
    "copy_adjoint",
    "gather",
    "halo_exchange",
    "move",
    "move_adjoint",
    "repartition",
    "scatter",
    "send_recv",
    "sum_reduce",
    "sum_scatter",
    "zero_volume_tensor",
]
