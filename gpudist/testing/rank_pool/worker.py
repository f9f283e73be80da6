"""Main loop of one process of the pool."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from multiprocessing import connection

import torch
import torch.distributed as dist

from gpudist.testing.rank_pool.outcome import Outcome
from gpudist.transport.base import Transport
from gpudist.transport.failure.channel import Failure
from gpudist.world import runtime

# The order to end. It is needed because a forked process does not notice that its pipe is closed:
# processes forked later also hold the other end.
END = None
# Number of times that all worlds had ended before it, transport and size.
World = tuple[int, str, int]


def serve(
    pipe: connection.Connection, port: int, stack_path: str, variables: dict[str, str]
) -> None:
    """Serve as a rank: execute orders and answer with their outcomes."""
    gc.freeze()  # later collections leave out all that is imported
    runtime.set_variables(variables)
    threading.Thread(target=watch_parent, daemon=True).start()
    stack_file = open(stack_path, "w")  # noqa: SIM115 (as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    torch.set_num_threads(1)
    wires: dict[World, Transport] = {}
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError, ConnectionResetError):
        while (order := pickle.loads(pipe.recv_bytes())) != END:
            pipe.send_bytes(_answer(carry_out(wires, port, *order)))
    for wire in wires.values():
        wire.close()


def watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def carry_out(
    wires: dict[World, Transport],
    port: int,
    world: World,
    rank: int,
    timeout_s: float,
    task: bytes,
) -> Outcome:
    generation, transport, size = world
    try:
        for ended in [other for other in wires if other[0] != generation]:
            wires.pop(ended).close()
        if world not in wires:
            # Each world has a separate store, so that a blocking call of one does not delay
            # another.
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            runtime.take_device(transport, rank)
            prefix = f"gpudist/pool/{generation}/{transport}/{size}"
            wires[world] = runtime.connect(transport, store, rank, size, timeout_s, prefix)
        wire = wires[world]
        # Each run begins like a new loopback world: equal random generators, no agreed shapes.
        torch.manual_seed(0)
        wire.remembered.clear()
        fn, args, kwargs = pickle.loads(task)
        value = runtime.run_as_rank(fn, wire, args, kwargs)
        return Outcome(rank, value, world_ended=wire.error() is not None)
    except BaseException as error:
        if world in wires:
            wires[world].abort(Failure.from_exception(error, rank))
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        return Outcome(rank, error=error, text=f"raised:\n{text}")


def _answer(outcome: Outcome) -> bytes:
    try:
        answer = pickle.dumps(outcome)
        pickle.loads(answer)
        return answer
    except Exception as refusal:
        what = outcome.error if outcome.error is not None else refusal
        error = RuntimeError(f"{type(what).__name__}: {what}")
        text = outcome.text or f"returned a value that cannot be pickled: {refusal}"
        return pickle.dumps(Outcome(outcome.rank, error=error, text=text))
