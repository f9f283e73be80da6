"""Send-receive: the blocks of one partition move to the workers of another of the same size."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.errors import PartitionError
from gpudist.ops.agreement import ShapeMode
from gpudist.ops.arrays import Array, applied
from gpudist.ops.broadcast import Broadcast
from gpudist.ops.operator import remembered
from gpudist.world.partition import Partition


class SendRecv(Broadcast):
    """Send each block of ``P_x`` to the worker of ``P_y`` of equal rank; see :func:`send_recv`."""

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
                f"SendRecv: P_x has shape {list(P_x.shape)} and P_y {list(P_y.shape)}; they must "
                "be equal"
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

    Collective over ``P_x`` and ``P_y``; a pipeline's step from one stage to the next.

    Args:
        x: the block on workers of ``P_x``, a tensor or a NumPy or CuPy array; a zero-volume
            placeholder elsewhere.
        P_x, P_y: senders and receivers, of equal shape.
        preserve_batch: workers of ``P_x`` alone get ``(batch, 0)`` instead of ``(0,)``.
        global_shape: of the balanced tensor, to save agreeing on the blocks.
        shape: ``"dynamic"`` has each source tell its receivers at every call; then size, dtype and
            number of dims may change, placeholders say nothing, and an output requires grad iff its
            source does. ``"static"`` refuses what a placeholder cannot tell.

    Returns:
        New tensor, or array if ``x`` is one: what was received; a zero-volume one on workers of
        ``P_x`` alone; a clone of ``x`` on workers in neither.

    Adjoint:
        The gradient goes back to the sender.

    Cost:
        One message per pair of workers; with ``"dynamic"`` one of 104 bytes before it, which
        receivers read and senders do not wait for.

    Raises:
        PartitionError: on every rank alike, if the partitions differ in shape.
        PlanMismatch: as of :func:`~gpudist.broadcast`.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    operator = remembered(
        SendRecv, P_x, P_y, preserve_batch,
        global_shape=global_shape, shape=shape,
    )  # fmt: skip
    return applied(operator, x)
