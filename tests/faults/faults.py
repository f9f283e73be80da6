"""The table of faults: what happens to a rank, where, and how it may disagree with others."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.faults.operators import SAME, Meaning

# Fault of a rank, and the signal that causes it.
FAULTS = {
    "killed": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "crashed": signal.SIGSEGV,
    "raised": None,
    "slow": None,
}
POINTS = (
    "before",
    "packing",
    "message",
    "unpacking",
    "backward",
    "init",
    "split",
    "shutdown",
    "any time",
)
# An operator and what its rank means, in the order of the calls.
Calls = list[tuple[str, Meaning]]
# Calls of a rank in place of an operator, followed by another one.
DISAGREEMENTS: dict[str, Callable[[str, str], Calls]] = {
    "operator": lambda name, after: [(after, SAME), (after, SAME)],
    "order": lambda name, after: [(after, SAME), (name, SAME)],
    "calls more": lambda name, after: [(name, SAME), (name, SAME), (after, SAME)],
    "calls fewer": lambda name, after: [(after, SAME)],
    "shape": lambda name, after: [(name, Meaning(nbytes=480)), (after, SAME)],
    "dtype": lambda name, after: [(name, Meaning(has_other_dtype=True)), (after, SAME)],
    "partition": lambda name, after: [(name, Meaning(reverses=True)), (after, SAME)],
    "kernel": lambda name, after: [(name, Meaning(other=True)), (after, SAME)],
}
