"""Send-receive: send the blocks of one partition to the workers of another one of equal shape."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.errors import PartitionError
from gpudist.ops.arrays import Array, apply_to_array
from gpudist.ops.broadcast import Broadcast
from gpudist.ops.operator import cached_operator
from gpudist.ops.operators import operator
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import Partition


@operator(
    "send_recv",
    lambda kind, P_x: kind(
        P_x.grid(P_x.shape[0]),
        P_x.create_partition_inclusive(range(P_x.size)[::-1][: P_x.shape[0]]),
    ),
    (5, 3),
)
class SendRecv(Broadcast):
    """Send each block of ``P_x`` to the worker of ``P_y`` of equal rank; see :func:`send_recv`.

    Args:
        P_x ... shape: see :func:`send_recv`.
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        preserve_batch: bool = True,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        if P_x.shape != P_y.shape:
            raise PartitionError(
                f"SendRecv: P_x has shape {list(P_x.shape)} and P_y {list(P_y.shape)}; the shapes "
                "must be equal"
            )
        super().__init__(
            P_x, P_y, preserve_batch=preserve_batch, global_shape=global_shape, shape=shape
        )


def send_recv(
    x: Array,
    P_x: Partition,
    P_y: Partition,
    preserve_batch: bool = True,
    *,
    global_shape: Sequence[int] | None = None,
    shape: ShapeMode = "static",
) -> Array:
    """Send each worker's block of ``P_x`` to the worker of ``P_y`` of equal rank.

    Collective over ``P_x`` and ``P_y``; for example from one pipeline stage to the next.

    Args:
        x: block on workers of ``P_x``, a tensor or a NumPy or CuPy array; a zero-volume placeholder
            elsewhere.
        P_x, P_y: partitions of senders and receivers, of equal shape.
        preserve_batch: workers that are only in ``P_x`` get ``(batch, 0)`` instead of ``(0,)``.
        global_shape: global shape of the balanced tensor; saves the agreement on the blocks.
        shape: ``"dynamic"`` makes each source send its block's shape to the receiver at every call;
            then size, dtype and number of dims may change, placeholders are ignored, and an output
            requires grad iff its source does. ``"static"`` raises for changes that a placeholder
            cannot show.

    Returns:
        New tensor, or array if ``x`` is one: the received block; a zero-volume tensor on workers
        that are only in ``P_x``; a clone of ``x`` on workers in neither partition.

    Adjoint:
        Send the gradient from receiver to sender.

    Cost:
        One message per pair of workers. With ``"dynamic"``, a message of 104 bytes before it, for
        which receivers wait and senders do not.

    Raises:
        PartitionError: on every rank alike, if the partitions differ in shape.
        PlanMismatch: see :func:`~gpudist.broadcast`.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    operator = cached_operator(SendRecv, P_x, (P_y, preserve_batch, global_shape, shape))
    return apply_to_array(operator, x)
