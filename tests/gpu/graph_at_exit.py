"""A program that ends while a graph with messages of a communicator is alive."""

from __future__ import annotations

import atexit

from tests.gpu.self_communicator import CLOSING_S, SelfCommunicator, pattern
from tests.gpu.streams import recorded

alone = SelfCommunicator()
atexit.register(alone.core.close, CLOSING_S)
x = pattern(1 << 20, 0, alone.device)
y = x.new_zeros(x.shape)
replay = recorded(lambda: alone.exchange([x], [y]), alone.device, rehearsed=True)
replay()
alone.finish()
print("right" if y.equal(x) else "wrong", flush=True)
