"""Points where a fault occurs: interfaces of the transports in the victim, and memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gpudist.transport.gloo import GlooTransport
from gpudist.transport.host.meeting import HostMeeting
from gpudist.transport.nccl.rendezvous import Rendezvous
from gpudist.world.partition import Partition
from tests.doubles.nccl import inject
from tests.faults.chaos.experiment import MEDIUM, NATIVE, Experiment
from tests.faults.chaos.guarded import guard_next_output, guarded_copy, set_blow
from tests.faults.chaos.strike import Strike

Fire = Callable[[], None]


def calls(owner: Any, name: str, *, before: Fire | None = None, after: Fire | None = None) -> None:
    """Let a method of ``owner``, a class or an object, call these too."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = method(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(owner, name, wrapped)


class Victim:
    """Rank in which the fault occurs, before and during its steps.

    Args:
        tried: the experiment.
        strike: what happens.
    """

    def __init__(self, tried: Experiment, strike: Strike) -> None:
        self.tried = tried
        self.strike = strike
        self.rng = random.Random(tried.seed)
        self._guard_output: Fire | None = None

    @property
    def is_native(self) -> bool:
        return self.tried.transport in NATIVE

    def before_joining(self) -> None:
        """Strike when it joins the world: before it does, or on the way."""
        if self.tried.point != "init":
            return
        self.strike.armed = True
        if self.rng.random() < 0.4:
            self.strike.fire()
        elif self.tried.transport == "host":
            calls(HostMeeting, "_await", before=self.strike.fire)
        elif self.tried.transport == "gloo":
            calls(GlooTransport, "_await_all", after=self.strike.fire)
        else:
            name = self.rng.choice(["arrive", "share_id"])
            calls(Rendezvous, name, after=self.strike.fire)

    def after_joining(self, P_world: Partition) -> None:
        """Prepare what must be there before anything is bound."""
        wire: Any = P_world.wire
        point, fire = self.tried.point, self.strike.fire
        if self.is_native:
            raises_in_packing = point == "packing" and self.strike.fault == "raised"
            if point == "unpacking" or raises_in_packing:
                self._guard_output = guard_next_output(self.strike)
            elif point == "message" and self.tried.transport == "loopback":
                me = threading.current_thread()
                calls(wire._turns, "wait", before=lambda: self._while_in_flight(me))
        elif point == "packing":
            calls(wire, "queue", after=fire)
        elif point == "message":
            calls(wire, "_wait", before=self._while_in_flight)
        elif point == "unpacking":
            calls(wire, "_wait", after=fire)
        if point == "split":
            if self.tried.transport == "nccl":
                calls(wire._rendezvous, "share_id", after=fire)
            else:
                calls(wire, "_make_communicator", before=fire)

    def _while_in_flight(self, thread: threading.Thread | None = None) -> None:
        # All threads wait by the same object.
        if thread not in (None, threading.current_thread()):
            return
        if self.strike.armed:
            time.sleep(self.rng.uniform(0.0, 0.01))
        self.strike.fire()

    def begin_step(self, about_s: float) -> None:
        """Begin the step in which the fault occurs; it takes about ``about_s``."""
        point = self.tried.point
        if self._guard_output is not None:
            self._guard_output()
        elif self._in_a_message_of_nccl:
            set_blow(self.strike)
            inject("crash", -1, 0)
        elif not self._touches_a_page:
            self.strike.armed = point not in ("split", "shutdown")
        if point == "before":
            self.strike.fire()
        if self.is_timed:
            self.strike.fire_within(about_s, self.rng)

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """Return the operator's input at that step."""
        if not self._touches_a_page:
            return x
        # When the third piece of a message is packed, the first have been sent.
        return guarded_copy(x, 0.5 if self.tried.point == "packing" else 0.75, self.strike)

    @property
    def _touches_a_page(self) -> bool:
        tried = self.tried
        if not self.is_native or tried.fault == "raised":
            return False
        in_pieces = tried.transport == "host" and tried.nbytes == MEDIUM
        return tried.point == "packing" or (tried.point == "message" and in_pieces)

    @property
    def _in_a_message_of_nccl(self) -> bool:
        tried = self.tried
        is_there = tried.transport == "nccl" and tried.point == "message"
        return is_there and tried.fault != "raised"

    @property
    def is_timed(self) -> bool:
        """Whether a clock chooses the moment."""
        if self.tried.point == "any time":
            return True
        is_exact = (
            self._touches_a_page or self._in_a_message_of_nccl or self.tried.transport == "loopback"
        )
        return self.tried.point == "message" and self.is_native and not is_exact

    def before_closing(self, wire: Any) -> None:
        """Strike while it closes its transport."""
        if self.tried.point != "shutdown":
            return
        self.strike.armed = True
        if self.tried.fault == "raised":
            self.strike.fire()
        channel = getattr(wire, "_channel", None)
        if channel is not None and self.rng.random() < 0.5:
            calls(channel, "close", before=self.strike.fire)
        else:
            calls(wire, "close", before=self.strike.fire)
