"""A link between two tunnels: it delays packets, loses some, and can be cut."""

from __future__ import annotations

import heapq
import os
import random
import select
import threading
import time
from contextlib import suppress

_PACKET_BYTES = 65536


class Link:
    """Carries packets between the tunnels ``ends``, in a thread, until it is closed.

    Args:
        ends: two descriptors, which become this object's.
        delay_s: of every packet.
        loss: the share of packets that are lost, drawn from ``seed``.

    Attributes:
        carried, lost: packets so far.
        is_cut: nothing is carried any more.
    """

    def __init__(self, ends: tuple[int, int], delay_s: float, loss: float, seed: int = 0) -> None:
        self.carried = 0
        self.lost = 0
        self.is_cut = False
        self._ends = ends
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def close(self) -> None:
        os.write(self._waker, b"x")
        self._thread.join()
        for descriptor in (*self._ends, self._wake, self._waker):
            os.close(descriptor)

    def _carry(self) -> None:
        """Forward data; an end whose host is down reports an error, and is closed."""
        poll = select.poll()
        for descriptor in (*self._ends, self._wake):
            poll.register(descriptor, select.POLLIN)
        while True:
            wait_s = self._waiting[0][0] - time.monotonic() if self._waiting else 1.0
            for descriptor, _ in poll.poll(max(0.0, 1000 * wait_s)):
                if descriptor == self._wake:
                    return
                try:
                    self._take(descriptor)
                except OSError:
                    poll.unregister(descriptor)
            self._deliver()

    def _take(self, end: int) -> None:
        packet = os.read(end, _PACKET_BYTES)
        if self.is_cut or self._random.random() < self._loss:
            self.lost += 1
            return
        self.carried += 1
        other = self._ends[0] if end == self._ends[1] else self._ends[1]
        due_s = time.monotonic() + self._delay_s
        heapq.heappush(self._waiting, (due_s, self.carried, other, packet))

    def _deliver(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            *_, end, packet = heapq.heappop(self._waiting)
            # Data in flight to a host that is down is lost.
            with suppress(OSError):
                os.write(end, packet)
