"""Linear operators on distributed tensors: a function and a module per file.

The functions that move data also take NumPy and CuPy arrays, and return the same kind. Arrays take
no part in autograd. ``gpudist`` and ``gpudist.nn`` list most of the names.
"""

from typing import TYPE_CHECKING, NoReturn

from gpudist.checks.hints import MissingName as _MissingName
from gpudist.ops.all_gather import (
    AllGather as AllGather,
    SumScatter as SumScatter,
    all_gather as all_gather,
    sum_scatter as sum_scatter,
)
from gpudist.ops.all_sum_reduce import (
    AllSumReduce as AllSumReduce,
    all_sum_reduce as all_sum_reduce,
)
from gpudist.ops.broadcast import Broadcast as Broadcast, broadcast as broadcast
from gpudist.ops.gather import (
    Gather as Gather,
    Scatter as Scatter,
    gather as gather,
    scatter as scatter,
)
from gpudist.ops.halo_exchange import HaloExchange as HaloExchange, halo_exchange as halo_exchange
from gpudist.ops.memory import (
    add as add,
    add_adjoint as add_adjoint,
    allocate as allocate,
    clear as clear,
    copy as copy,
    copy_adjoint as copy_adjoint,
    deallocate as deallocate,
    move as move,
    move_adjoint as move_adjoint,
)
from gpudist.ops.operator import zero_volume_tensor as zero_volume_tensor
from gpudist.ops.operators import OPERATORS as OPERATORS
from gpudist.ops.repartition import Repartition as Repartition, repartition as repartition
from gpudist.ops.send_recv import SendRecv as SendRecv, send_recv as send_recv
from gpudist.ops.shift import Shift as Shift, shift as shift
from gpudist.ops.sum_reduce import SumReduce as SumReduce, sum_reduce as sum_reduce

__all__ = [
    "OPERATORS",
    "Shift",
    "add",
    "add_adjoint",
    "allocate",
    "clear",
    "copy",
    "copy_adjoint",
    "deallocate",
    "move",
    "move_adjoint",
    "shift",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise _MissingName(__name__, name)
