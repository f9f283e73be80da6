"""Broadcast of a batch whose structure and shapes only one rank knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpudist.batch.batch_channel import channel_of
from gpudist.batch.named_classes import base_of
from gpudist.checks.arguments import checked
from gpudist.world.partition import Partition


@checked(any_storage=True)
def broadcast_batch(
    batch: Any,
    P: Partition,
    root: int = 0,
    *,
    axes: Sequence[int] | None = None,
    differentiable: bool = False,
) -> Any:
    """Broadcast the root's batch, of any structure, shapes and dtypes, to every worker of ``P``.

    Collective over ``P``, or over each line of workers along ``axes``. The host waits only for the
    header; over NCCL, the payload arrives in stream order.

    Args:
        batch: on the root, any nest of dicts and other mappings, lists, tuples, dataclasses and
            named tuples of tensors, NumPy arrays, numbers, strings, bytes, enums and ``None``, or a
            function that returns one. Ignored elsewhere.
        P: partition of the workers.
        root: position of the worker that has the batch, in ``P`` or along ``axes``, if given.
        axes: axes of the process grid; each line of workers along them has its own root, and does
            not wait for other lines.
        differentiable: whether tensors that require grad on the root do so on every worker, with
            gradients summed on the root; the same on all ranks.

    Returns:
        The nest, on the root too, with new contiguous tensors on ``P``'s device that may share
        memory with one another, but with nothing else; ``None`` on workers outside ``P``.
        Instances of classes are rebuilt without running their code, from classes that are already
        imported.

    Adjoint:
        With ``differentiable``: the sum of the workers' gradients, on the root.

    Cost:
        One message if the whole batch fits into 3.7 KiB of host memory, else two: the header and
        one packed payload. Strings and a structure beyond that size add a third. With
        ``differentiable``, one more for each dtype that gets gradients.

    Raises:
        ShapeError, TransportError: on the root, if something in the batch cannot be sent; the
            other workers raise ``RemoteError``.
        RemoteError: if the root's function raised; the root raises the original exception.
        StopIteration: on every rank, if the root's function raised ``StopIteration``.
        PartitionError: if ``root`` or ``axes`` do not exist in ``P``.
    """
    channel = channel_of("broadcast_batch", P, root, axes, differentiable)
    if channel is None:
        return None
    if not channel.is_root:
        return channel.receive()
    try:
        is_function = callable(batch) and base_of(type(batch)) is None
        prepared = channel.prepare(batch() if is_function else batch)
    except BaseException as error:
        channel.send_error(error)
        raise
    return channel.send(prepared)
