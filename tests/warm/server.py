"""The server: imports once, then forks a process to watch each program and one to run it."""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import marshal
import multiprocessing.spawn
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
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, NoReturn

from tests import garbage as garbage

# Modules that the tests' programs import, or that torch imports when they train.
IMPORTED = (
    "gpudist._names",
    "gpudist.cli.check",
    "gpudist.cli.draw",
    "gpudist.cli.env",
    "gpudist.cli.main",
    "gpudist.cli.plan",
    "matplotlib.pyplot",
    "rich.progress",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
)
_PR_SET_PDEATHSIG = 1
# Not the command that a program's server is started with.
_INTERPRETER = os.fsdecode(multiprocessing.spawn.get_executable())


class Program(NamedTuple):
    """A program that a client wants to run."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    ignored: list[int]
    files: list[int]


def main(address: str, until: str, script: str) -> None:
    owner = os.pidfd_open(int(until))
    for name in IMPORTED:
        import_module(name)
    if script:
        import_module("tests.examples.trainers").run(script, "imported")
    _leave_out_what_takes_long()
    # Children of these programs are such processes too, unless they inherit files.
    sys.executable = str(Path(address).with_name("python"))
    multiprocessing.set_executable(_INTERPRETER)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(128)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    # Whoever finds it can connect to it.
    os.rename(f"{address}.new", address)
    while True:
        ready, _, _ = select.select([listener, owner], [], [])
        if listener not in ready:
            shutil.rmtree(Path(address).parent)
            return
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(owner)
            break
        client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = _read(client)
    if (child := os.fork()) != 0:
        _watch(child, client)
    client.close()
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


def _read(client: socket.socket) -> Program:
    length, extra, _, _ = client.recvmsg(8, socket.CMSG_SPACE(12))
    files = array.array("i")
    files.frombytes(extra[0][2])
    text = b""
    while len(text) < int.from_bytes(length, "little"):
        text += client.recv(1 << 20)
    arguments, folder, environment, ignored = marshal.loads(text)
    return Program(arguments, folder, environment, ignored, list(files))


def _watch(child: int, client: socket.socket) -> None:
    """Pass signals on until the program has ended; it ends with the client."""
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([client, ended], [], [])
        if ended in ready:
            break
        number = client.recv(1)
        os.kill(child, number[0] if number else signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        client.send(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
    finally:
        os._exit(0)


def _become(program: Program) -> None:
    """Take over what belongs to a process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, file in enumerate(program.files):
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
    while rest and rest[0] == "-u":
        del rest[0]
        sys.stdout.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
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
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
