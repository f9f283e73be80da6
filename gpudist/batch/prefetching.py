"""Batches loaded and packed by a thread, a few ahead of who takes them."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.batch.flattener import Flattener
from gpudist.batch.prepared import Prepared, prepare
from gpudist.errors import PartitionError

_LOOK_EVERY_S = 0.2
_PATIENCE_S = 0.5


@dataclass(frozen=True)
class Raised:
    """An exception in place of a batch; ``StopIteration`` at the end."""

    error: BaseException


class Loaded:
    """Prepared batches of ``loader``, one after the other; loads in the caller's thread."""

    def __init__(self, loader: Iterable[Any] | None, device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._batches: Iterator[Any] | None = None
        self._flattener = Flattener()

    def take(self, look: Callable[[], None]) -> Prepared | Raised:
        """The next one. ``look`` is called now and then while there is none; it may raise."""
        return self.load()

    def load(self) -> Prepared | Raised:
        try:
            self.open()
            assert self._batches is not None
            return prepare(next(self._batches), self._device, self._flattener)
        except BaseException as error:
            return Raised(error)

    def open(self) -> None:
        """Begin to iterate; done by the first load otherwise."""
        if self._loader is None:
            raise PartitionError("stream_batches: the root has no loader; give it one")
        if self._batches is None:
            self._batches = iter(self._loader)

    def close(self) -> None:
        self._batches = None


class Prefetched(Loaded):
    """The same by a thread of its own, up to ``ahead`` batches before they are taken.

    It ends with its owner, at the end of the batches, or when it is closed.
    """

    def __init__(self, loader: Iterable[Any] | None, device: torch.device, ahead: int) -> None:
        super().__init__(loader, device)
        self._loaded: queue.Queue[Prepared | Raised] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, look: Callable[[], None]) -> Prepared | Raised:
        if self._thread is None:
            self._start()
        while True:
            try:
                return self._loaded.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                look()

    def _start(self) -> None:
        source = Loaded(self._loader, self._device)
        try:
            # Here, since a loader may draw its seed from this thread's random generator.
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


def _load(source: Loaded, loaded: queue.Queue[Prepared | Raised], stopped: threading.Event) -> None:
    # Not a method: a thread that held its owner would keep it from ever being collected.
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
    # A thread inside torch when the interpreter ends would end the process with an abort.
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_PATIENCE_S)
