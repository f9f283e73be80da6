"""Load and pack batches in a thread, a few batches ahead of the consumer."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.batch.flattener import Flattener
from gpudist.batch.prepared import PreparedBatch, prepare
from gpudist.errors import PartitionError

_LOOK_EVERY_S = 0.2
_PATIENCE_S = 0.5


@dataclass(frozen=True)
class Raised:
    """Exception raised in place of a batch; ``StopIteration`` at the end."""

    error: BaseException


class LoadedBatches:
    """Prepared batches of ``loader``, in order, loaded in the caller's thread."""

    def __init__(self, loader: Iterable[Any] | None, device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._batches: Iterator[Any] | None = None
        self._flattener = Flattener()

    def take(self, look: Callable[[], None]) -> PreparedBatch | Raised:
        """Return the next batch. While waiting, call ``look`` periodically, which may raise."""
        return self.load()

    def load(self) -> PreparedBatch | Raised:
        try:
            self.open()
            assert self._batches is not None
            return prepare(next(self._batches), self._device, self._flattener)
        except BaseException as error:
            return Raised(error)

    def open(self) -> None:
        """Start iterating over the loader, unless it has been started."""
        if self._loader is None:
            raise PartitionError(
                "stream_batches: the loader is None on the root; pass a loader there"
            )
        if self._batches is None:
            self._batches = iter(self._loader)

    def close(self) -> None:
        self._batches = None


class PrefetchedBatches(LoadedBatches):
    """Prepared batches of ``loader``, loaded by a thread up to ``ahead`` batches in advance.

    The thread ends with its owner, at the end of the batches, or on :meth:`close`.
    """

    def __init__(self, loader: Iterable[Any] | None, device: torch.device, ahead: int) -> None:
        super().__init__(loader, device)
        self._loaded: queue.Queue[PreparedBatch | Raised] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, look: Callable[[], None]) -> PreparedBatch | Raised:
        if self._thread is None:
            self._start()
        while True:
            try:
                return self._loaded.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                look()

    def _start(self) -> None:
        source = LoadedBatches(self._loader, self._device)
        try:
            # Start in the caller's thread, since a loader may draw its seed from that thread's
            # generator.
            source.open()
        except BaseException as error:
            self._loaded.put(Raised(error))
        self._thread = threading.Thread(
            target=_load, args=(source, self._loaded, self._stopped), name="gpudist batches",
            daemon=True,
        )  # fmt: skip
        self._stop = weakref.finalize(self, _stop, self._stopped, self._thread)
        if self._loaded.empty():
            self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._stop()


def _load(
    source: LoadedBatches, loaded: queue.Queue[PreparedBatch | Raised], stopped: threading.Event
) -> None:
    # This is not a method, because a thread that references its owner prevents its collection.
    is_last = False
    while not (is_last or stopped.is_set()):
        item = source.load()
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
