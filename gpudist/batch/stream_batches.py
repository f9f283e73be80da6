"""Stream the batches of a loader on one rank to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpudist.batch.batch_channel import BatchChannel, channel_of
from gpudist.batch.prefetching import LoadedBatches, Raised
from gpudist.checks.arguments import checked, describe
from gpudist.errors import ShapeError
from gpudist.ops.shape_agreement import reject
from gpudist.world.partition import Partition


class BatchStream(Iterator[Any]):
    """Iterator, on every worker, over the batches of one worker's loader.

    See :func:`stream_batches`.

    Args:
        channel: channel that carries the batches; ``None`` on a worker outside the stream.
        source: batches of the loader, on the worker that loads; ``None`` on others.
    """

    def __init__(self, channel: BatchChannel | None, source: LoadedBatches | None) -> None:
        self._channel = channel
        self._source = source

    def __next__(self) -> Any:
        """Return the next batch. Collective over the workers of the stream."""
        channel = self._channel
        if channel is None:
            raise StopIteration
        try:
            return self._send(channel, self._source) if self._source else channel.receive()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop loading. Call it on all workers after the same batch; it does not communicate."""
        self._channel = None
        if self._source is not None:
            self._source.close()

    def _send(self, channel: BatchChannel, source: LoadedBatches) -> Any:
        loaded = source.take(channel.P.wire.check)
        if isinstance(loaded, Raised):
            channel.send_error(loaded.error)
            raise loaded.error
        return channel.send(loaded)


@checked()
def stream_batches(
    loader: Iterable[Any] | None,
    P: Partition,
    root: int = 0,
    *,
    axes: Sequence[int] | None = None,
    prefetch: int = 1,
) -> BatchStream:
    """Iterate on every worker of ``P`` over the batches of the root's ``loader``.

    Each step is one :func:`gpudist.broadcast_batch`, called in the caller's thread in order with
    its other operators. Meanwhile, a thread on the root loads and packs the next batches. Iteration
    ends on all workers together.

    Args:
        loader: on the root, any iterable; ignored elsewhere.
        P, root, axes: see :func:`gpudist.broadcast_batch`.
        prefetch: number of batches loaded ahead. With 0, the caller's thread loads them, which is
            required for a loader that draws from torch's default generator at every batch.

    Returns:
        An iterator over the batches; empty on workers outside ``P``.

    Raises:
        RemoteError: while iterating, if the loader raised on the root, which raises the original
            exception.
        ShapeError: if the loader is not an iterable.
        PartitionError: if ``root`` or ``axes`` do not exist in ``P``; while iterating, on the root,
            if it has no loader.
    """
    if not isinstance(loader, Iterable | None):
        text = f"stream_batches: loader is {describe(loader)}; pass an iterable on the root"
        reject(P, ShapeError(text))
    channel = channel_of("stream_batches", P, root, axes)
    if channel is None or not channel.is_root:
        return BatchStream(channel, None)
    return BatchStream(channel, LoadedBatches(loader, P.device, prefetch))
