"""Broadcast batches whose structure and shapes only one rank knows, packed in one message."""

from gpudist.batch.broadcast_batch import broadcast_batch
from gpudist.batch.stream_batches import BatchStream, stream_batches

__all__ = ["BatchStream", "broadcast_batch", "stream_batches"]
