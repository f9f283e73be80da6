"""Run an experiment, and judge the outcome of every rank."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from gpudist.errors import CollectiveTimeout, PeerFailure
from gpudist.transport.failure.channel import Failure
from gpudist.transport.loopback import LoopbackTransport, LoopbackWorld
from gpudist.world.runtime import world_of
from tests.faults.chaos.experiment import DEADLINE_S, LONG_S, Experiment
from tests.faults.chaos.play import PATIENCE_S, join, play, steps
from tests.faults.chaos.points import Victim
from tests.faults.chaos.strike import Strike
from tests.faults.ranks import Answer, Ranks

# A rank that has not ended so long after it should have hangs.
# Worlds of threads share torch's generator.
_one_world = threading.Lock()
_HUNG_S = LONG_S + PATIENCE_S + 10.0
_CLOSING_S = DEADLINE_S + 1.0
# An operation and its partition, as every label has them: halo_exchange on [1, 3] of ...
_OPERATION = re.compile(r"'[^']+'|missing ranks")
_ATTEMPTS = 3
BAD = ("lost", "hung", "wrong", "late", "misnamed", "left", "unreached")


@dataclass
class Verdict:
    """Verdict on an experiment.

    Attributes:
        how: ``"detected"``: every survivor raised the expected error in time; ``"survived"``: no
            error was expected or raised; or a bad outcome, one of ``BAD``.
        after_s: seconds from the fault to each survivor's error.
        text: reason if it is bad.
        attempts: number of attempts, of which the last gave this verdict.
    """

    how: str
    after_s: list[float] = field(default_factory=list)
    text: str = ""
    attempts: int = 1


def conduct(tried: Experiment) -> Verdict:
    """Run an experiment once; repeat it if a busy machine may have made it late.

    That includes a deadline that passed before the fault.
    """
    for attempts in range(1, _ATTEMPTS + 1):
        verdict = attempt(tried)
        verdict.attempts = attempts
        if verdict.how not in ("unreached", "late"):
            break
    return verdict


def attempt(tried: Experiment) -> Verdict:
    if tried.transport == "loopback":
        return on_threads(tried)
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        verdict = on_processes(tried, folder)
        files = os.listdir(folder)
        if files and verdict.how not in BAD:
            return Verdict("left", text=f"files {files}")
    return verdict


def on_processes(tried: Experiment, folder: str) -> Verdict:
    shared = _shared_memory()
    with Ranks(
        tried.ranks,
        play,
        tried,
        timeout_s=tried.deadline_s,
        transport=tried.transport,
        store_rank=tried.store_rank,
        before=_join,
        folder=folder,
    ) as ranks:
        is_stopped = tried.fault == "stopped"
        answers = ranks.answers(_HUNG_S, besides=tried.victim if is_stopped else None)
        struck_s = ranks.struck_s(tried.victim)
        if is_stopped:
            with suppress(ProcessLookupError):
                os.kill(ranks.pid(tried.victim), signal.SIGCONT)
            answers |= _late_answer(ranks, tried.victim)
        verdict = judge(tried, answers, struck_s)
        pids = [process.pid for process in ranks.processes]
    left = [f"process {pid}" for pid in pids if os.path.exists(f"/proc/{pid}")]
    left += sorted(_shared_memory() - shared)
    if left and verdict.how not in BAD:
        return Verdict("left", text=", ".join(left))
    return verdict


def _join(rank: int, tried: Experiment) -> None:
    join(rank, tried)


def _late_answer(ranks: Ranks, victim: int) -> dict[int, Answer]:
    with suppress(EOFError, ConnectionResetError):
        if ranks.ends[victim].poll(_HUNG_S):
            return {victim: ranks.ends[victim].recv()}
    return {}


def on_threads(tried: Experiment) -> Verdict:
    """Return a loopback world, whose ranks are threads."""
    strike = Strike(tried.fault, -1)
    answers: dict[int, Answer] = {}

    def body(wire: LoopbackTransport) -> None:
        answer = answers[wire.rank] = Answer()
        victim = Victim(tried, strike) if wire.rank == tried.victim else None
        try:
            answer.value = steps(world_of(wire), tried, victim)
        except BaseException as error:
            answer.error = error.with_traceback(None)
            answer.end_s = time.monotonic()
            wire.abort(Failure.from_exception(error, wire.rank))
            raise
        answer.end_s = time.monotonic()

    def run() -> None:
        with suppress(Exception):
            LoopbackWorld(tried.ranks, tried.deadline_s).run(body)

    with _one_world:
        runner = threading.Thread(target=run, daemon=True)
        runner.start()
        runner.join(_HUNG_S)
    if runner.is_alive():
        return Verdict("hung", text="the threads have not ended")
    verdict = judge(tried, answers, strike.struck_s)
    if verdict.how not in BAD and _loopback_threads():
        return Verdict("left", text=f"threads {_loopback_threads()}")
    return verdict


def _loopback_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("gpudist loopback")]


def judge(tried: Experiment, answers: dict[int, Answer], struck_s: float | None) -> Verdict:
    """Judge the answers of the ranks and the time of the fault."""
    for rank, answer in answers.items():
        if "WrongNumbers" in str(answer.error):
            return Verdict("wrong", text=f"rank {rank}: {answer.error}")
    if struck_s is None:
        said = {rank: str(answer.error) for rank, answer in answers.items()}
        return Verdict("unreached", text=f"the victim was not struck: {said}")
    survivors = [rank for rank in range(tried.ranks) if rank != tried.victim]
    expected = set(survivors)
    if tried.fault in ("slow", "stopped", "raised"):
        expected.add(tried.victim)
    if expected - set(answers):
        return Verdict("hung", text=f"no answer of ranks {sorted(expected - set(answers))}")
    if tried.fault == "slow":
        return _judge_all_well(answers, list(range(tried.ranks)))
    went_on = tried.fault == "stopped" and answers[tried.victim].error is None
    if went_on and tried.point != "shutdown":
        return Verdict("lost", text="the stopped rank went on without an error")
    after_s = []
    for rank in survivors:
        answer = answers[rank]
        after_s.append(max(0.0, answer.end_s - struck_s))
        bad = _judge_survivor(tried, rank, answer, after_s[-1])
        if bad is not None:
            return bad
    if tried.point == "shutdown":
        return Verdict("survived")
    return Verdict("detected", after_s)


def _judge_all_well(answers: dict[int, Answer], ranks: list[int]) -> Verdict:
    for rank in ranks:
        if answers[rank].error is not None:
            text = f"rank {rank} failed without a fault: {answers[rank].error}"
            return Verdict("wrong", text=text)
        if answers[rank].leftovers:
            return Verdict("left", text=f"rank {rank}: {answers[rank].leftovers}")
    return Verdict("survived")


def _judge_survivor(tried: Experiment, rank: int, answer: Answer, after_s: float) -> Verdict | None:
    where = f"rank {rank}, after {after_s:.2f} s: {type(answer.error).__name__}: {answer.error}"
    error, text = answer.error, str(answer.error)
    # Gloo itself keeps the sockets of a world that it could not connect; and a thread waits for a
    # store that hangs.
    hangs = tried.fault == "stopped" and tried.store_rank == tried.victim
    if answer.leftovers and not hangs and not (tried.transport == "gloo" and tried.point == "init"):
        return Verdict("left", text=f"{where}: {answer.leftovers}")
    if answer.closing_s > _CLOSING_S:
        return Verdict("late", text=f"{where}: closing took {answer.closing_s:.2f} s")
    if error is None:
        return None if tried.point == "shutdown" else Verdict("lost", text=where)
    if after_s > DEADLINE_S + 1.0:
        return Verdict("late", text=where)
    is_known_dead = tried.point != "init" and tried.fault != "stopped"
    kinds = (PeerFailure,) if is_known_dead else (PeerFailure, CollectiveTimeout)
    if not isinstance(error, kinds):
        return Verdict("misnamed", text=where)
    if isinstance(error, PeerFailure) and error.rank != tried.victim:
        return Verdict("misnamed", text=where)
    if not re.search(rf"ranks? \[?{tried.victim}\b|ranks \[[\d, ]*\b{tried.victim}\b", text):
        return Verdict("misnamed", text=where)
    if tried.fault == "raised" and is_known_dead and "Mistake" not in text:
        return Verdict("misnamed", text=where)
    if not _OPERATION.search(text):
        return Verdict("misnamed", text=f"no operation: {where}")
    return None


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "gpudist" in name}
