"""Faults of the victim, at a moment that it reaches itself or that a clock chooses."""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
import time

from tests.faults.chaos.experiment import SLOW_S
from tests.faults.faults import FAULTS


class Mistake(Exception):
    """Error in the user's code."""


class Strike:
    """A fault that happens once.

    Args:
        fault: one of ``FAULTS``.
        report: descriptor that receives the time just before the fault; -1 keeps the time here.

    Attributes:
        armed: whether the fault happens when the victim next reaches the point.
        struck_s: monotonic time of the fault.
    """

    def __init__(self, fault: str, report: int) -> None:
        self.fault = fault
        self.report = report
        self.armed = False
        self.struck_s: float | None = None

    def fire(self) -> None:
        """Strike, if it is armed."""
        if not self.armed:
            return
        self.armed = False
        self.struck_s = time.monotonic()
        if self.report >= 0:
            os.write(self.report, struct.pack("d", self.struck_s))
        if self.fault == "raised":
            raise Mistake("in the user's code")
        if self.fault == "slow":
            time.sleep(SLOW_S)
            return
        number = FAULTS[self.fault]
        assert number is not None
        os.kill(os.getpid(), number)
        # A stop reaches another thread first, perhaps.
        time.sleep(0.1)

    def fire_within(self, limit_s: float, rng: random.Random) -> None:
        """Strike at a random moment, at the latest so long from now."""
        after_s = rng.uniform(0.0, limit_s)
        if self.fault == "raised":
            # In this thread, as the user's own handler of a signal would.
            signal.signal(signal.SIGALRM, lambda *_: self.fire())
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, after_s))
            return
        timer = threading.Timer(after_s, self.fire)
        timer.daemon = True
        timer.start()
