"""Load and pack batches in a thread, a few batches ahead of the consumer."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.batch.prepared import PreparedBatch, prepare
from gpudist.errors import PartitionError

_LOOK_EVERY_S = 0.2
_PATIENCE_S = 0.5


@dataclass(frozen=True)
class Raised:
    """Exception raised in place of a batch; ``StopIteration`` at the end."""

    error: BaseException


class LoadedBatches:
    """Prepared batches of ``loader``, in order.

    A thread loads them, and ends with its owner, at the end of the batches, or on :meth:`close`.

    Args:
        loader: any iterable.
        device: device of the partition's tensors.
        ahead: number of batches that wait for the consumer; with 0, the caller's thread loads.
    """

    def __init__(self, loader: Iterable[Any] | None, device: torch.device, ahead: int) -> None:
        self._loader = loader
        self._device = device
        self._ahead = ahead
        self._loaded: queue.Queue[PreparedBatch | Raised] = queue.Queue(ahead)
        self._batches: Iterator[Any] | None = None
        self._stop: Callable[[], object] | None = None

    def take(self, look: Callable[[], None]) -> PreparedBatch | Raised:
        """Return the next batch. While waiting, call ``look`` periodically, which may raise."""
        try:
            if self._batches is None:
                self._batches = self._start()
        except BaseException as error:
            return Raised(error)
        if not self._ahead:
            return _load(self._batches, self._device)
        while True:
            try:
                return self._loaded.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                look()

    def close(self) -> None:
        self._batches = None
        if self._stop is not None:
            self._stop()

    def _start(self) -> Iterator[Any]:
        """Start iterating, in the caller's thread: a loader may draw a seed from its generator."""
        if self._loader is None:
            raise PartitionError(
                "stream_batches: the loader is None on the root; pass a loader there"
            )
        batches = iter(self._loader)
        if self._ahead:
            stopped = threading.Event()
            thread = threading.Thread(
                target=_load_ahead, args=(batches, self._device, self._loaded, stopped),
                name="gpudist batches", daemon=True,
            )  # fmt: skip
            self._stop = weakref.finalize(self, _stop, stopped, thread)
            thread.start()
        return batches


def _load(batches: Iterator[Any], device: torch.device) -> PreparedBatch | Raised:
    try:
        return prepare(next(batches), device)
    except BaseException as error:
        return Raised(error)


def _load_ahead(
    batches: Iterator[Any],
    device: torch.device,
    loaded: queue.Queue[PreparedBatch | Raised],
    stopped: threading.Event,
) -> None:
    # This is not a method, because a thread that references its owner prevents its collection.
    is_last = False
    while not (is_last or stopped.is_set()):
        item = _load(batches, device)
        is_last = isinstance(item, Raised)
        while not stopped.is_set():
            try:
                loaded.put(item, timeout=_LOOK_EVERY_S)
                break
            except queue.Full:
                continue


def _stop(stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    # A thread still inside torch when the interpreter exits would abort the process.
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_PATIENCE_S)
