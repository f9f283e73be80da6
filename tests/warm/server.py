"""The server: imports once, then forks a process for each program, and tells how it ended."""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import gc
import marshal
import multiprocessing
import os
import random
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import warnings
import weakref
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, NoReturn

from tests import garbage as garbage

# Modules that tests and their programs import, or that torch imports when they train or compile.
IMPORTED = (
    "gpudist._names",
    "gpudist.checkpoint",
    "gpudist.cli.check",
    "gpudist.cli.draw",
    "gpudist.cli.env",
    "gpudist.cli.main",
    "gpudist.cli.plan",
    "gpudist.testing",
    "hypothesis",
    "matplotlib.pyplot",
    "multiprocessing.forkserver",
    "pytest",
    "rich.progress",
    "sklearn.datasets",
    "tests.faults.chaos.play",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
)
_INTERPRETER = sys.executable
_PR_SET_PDEATHSIG = 1
# Descriptors that arrive are moved above those that a program may want to have.
_ABOVE = 256


class Program(NamedTuple):
    """A program that a client wants to run; its files by the numbers that they are to have."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    ignored: list[int]
    files: dict[int, int]


def main(listener_file: str, folder: str, script: str) -> None:
    for name in IMPORTED:
        import_module(name)
    if script:
        import_module("tests.examples.trainers").run(script, "imported")
    _leave_out_what_takes_long()
    # Children of these programs are such programs too.
    sys.executable = str(Path(folder) / "python")
    multiprocessing.set_executable(sys.executable)
    gc.freeze()
    program = _serve(socket.socket(fileno=int(listener_file)))
    if program is None:
        shutil.rmtree(folder)
        return
    _become(program)
    try:
        _run(program.arguments)
        _end(0)
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        _end(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        _end(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def _leave_out_what_takes_long() -> None:
    """Leave out what programs would do for nobody."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # Destroys the operators that imported modules have declared, at the exit of each program.
    registry: Any = vars(weakref.finalize)["_registry"]
    registry.clear()
    # Looks through all imported modules for the line of a caller, which is logged at most.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""


def _serve(listener: socket.socket) -> Program | None:
    """Fork for each program until the input ends; return the program in the process of each.

    A client is told how its process ended. Bytes that it sends are signals for the process, which
    is killed if the client ends.
    """
    # By descriptors that are readable when the process has ended.
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        pids = {client: pid for pid, client in running.values()}
        ready, _, _ = select.select([0, listener, *running, *pids], [], [])
        if 0 in ready:
            return None
        for end in ready:
            if end is listener:
                client, _ = listener.accept()
                program = _read(client)
                if (pid := os.fork()) == 0:
                    for other in (listener, client, *pids):
                        other.close()
                    for ended in running:
                        os.close(ended)
                    return program
                for file in program.files.values():
                    os.close(file)
                running[os.pidfd_open(pid)] = pid, client
            elif isinstance(end, int):
                pid, client = running.pop(end)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    client.send(status.to_bytes(4, "little", signed=True))
                client.close()
                os.close(end)
            elif end.fileno() >= 0:
                number = end.recv(1)
                os.kill(pids[end], number[0] if number else signal.SIGKILL)


def _read(client: socket.socket) -> Program:
    length, extra, _, _ = client.recvmsg(8, socket.CMSG_SPACE(4 * _ABOVE))
    arrived = array.array("i")
    arrived.frombytes(extra[0][2])
    text = b""
    while len(text) < int.from_bytes(length, "little"):
        text += client.recv(1 << 20)
    arguments, folder, environment, ignored, numbers = marshal.loads(text)
    files = dict(zip(numbers, arrived, strict=True))
    return Program(arguments, folder, environment, ignored, files)


def _become(program: Program) -> None:
    """Take over what belongs to a process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    moved: dict[int, int] = {}
    for number, file in program.files.items():
        moved[number] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
        os.close(file)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
    for number in program.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    random.seed()
    sys.path[:] = [path for path in sys.path if path not in ("", str(Path(__file__).parents[2]))]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _run(arguments: list[str]) -> None:
    """Run like ``python ARGUMENTS``; for options not handled here, start the interpreter itself."""
    rest = list(arguments)
    while rest and rest[0] in ("-u", "-B"):
        if rest.pop(0) == "-u":
            stdout: Any = sys.stdout
            stdout.reconfigure(write_through=True)
    if not rest or (rest[0][0] == "-" and rest[0] not in ("-m", "-c")):
        os.execv(_INTERPRETER, [_INTERPRETER, *arguments])
    program = ModuleType("__main__")
    sys.modules["__main__"] = program
    if rest[0] == "-m":
        sys.argv = rest[1:]
        sys.path.insert(0, os.getcwd())
        warnings.filterwarnings("ignore", ".* found in sys.modules after import", RuntimeWarning)
        runpy._run_module_as_main(rest[1])  # pyright: ignore[reportAttributeAccessIssue]
        return
    if rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        sys.path.insert(0, "")
        code: CodeType = compile(rest[1], "<string>", "exec")
    else:
        sys.argv = rest
        path = Path(rest[0]).resolve()
        sys.path.insert(0, str(path.parent))
        program.__file__ = rest[0]
        code = compile(path.read_bytes(), rest[0], "exec")
    exec(code, program.__dict__)


def _end(status: int) -> NoReturn:
    """End like an interpreter, but without freeing memory that is shared with other processes.

    Freeing would write to all of it, and takes most of a second.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
