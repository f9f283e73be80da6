"""Run steps in separate processes and within their limits, even if others fail."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tests.gpu.first.steps import Step

ROOT = Path(__file__).resolve().parents[3]
Status = Literal["ok", "failed", "timeout", "skipped"]
# A command that could not even begin its work, by its exit status; 5 is pytest's without tests.
NOTHING_DONE = {3: "nothing is", 5: "no tests ran"}
STACKS_S = 3.0
ARCHIVE = "logs.zip"
# Limits are those of a machine with a GPU and nothing else to do.
REHEARSAL_PATIENCE = 6
LEAST_S = 5.0
ALWAYS = {
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,P2P,REG,COLL",
}
_WRONG = re.compile(r"^(FAILED|ERROR|E  +\S|error:|\w*(Error|Exception)\b|make: \*\*\*)")
_FRAME = re.compile(r'^  File "')


@dataclass(frozen=True)
class Outcome:
    """Outcome of a step; ``line`` is the most informative line of its output."""

    step: str
    shows: str
    status: Status
    seconds: float
    line: str


@dataclass(frozen=True)
class Place:
    """Where steps run.

    Attributes:
        out: folder of the logs and of ``summary.json``.
        rehearsal: whether the doubles replace CUDA and NCCL.
        gpus: number of GPUs.
        budget_s: time for all steps together; no step begins after it.
        nccl: libnccl for ranks that share a GPU; the default one if empty.
        packed: whether a step's files go into one archive, ``logs.zip``, as soon as it has ended.
    """

    out: Path
    rehearsal: bool = False
    gpus: int = 1
    budget_s: float = float("inf")
    nccl: str = ""
    packed: bool = False


def run_all(
    chosen: Sequence[Step], place: Place, say: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Run steps in sequence; ``summary.json`` is complete after each."""
    place.out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + place.budget_s
    outcomes: list[Outcome] = []
    for step in chosen:
        left_s = deadline_s - time.monotonic()
        why = why_skipped(step, place)
        if not why and left_s < LEAST_S:
            why = f"no time is left of {place.budget_s:g} s; --from '{step.name}' goes on here"
        if why:
            outcomes.append(Outcome(step.name, step.shows, "skipped", 0.0, why))
        else:
            limit_s = step.limit_s * (REHEARSAL_PATIENCE if place.rehearsal else 1)
            outcomes.append(run(step, place, min(limit_s, left_s)))
        (place.out / "summary.json").write_text(
            json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n"
        )
        say(outcomes[-1])
    return outcomes


def why_skipped(step: Step, place: Place) -> str:
    """Explain what a step lacks here; empty if it can run."""
    missing = [tool for tool in step.tools if not _which(tool)]
    if missing:
        return f"not found: {', '.join(missing)}"
    if place.rehearsal and not step.rehearsed:
        return "not over the doubles"
    if not place.rehearsal and place.gpus < step.gpus:
        return f"needs {step.gpus} GPUs, and there are {place.gpus}"
    return ""


def run(step: Step, place: Place, limit_s: float) -> Outcome:
    """Run one step, its output in a log of its name."""
    file_name = re.sub(r"\W+", "-", step.name)
    log = place.out / f"{file_name}.log"
    command = [part.format(out=place.out, gpus=place.gpus) for part in step.command]
    command[0] = _which(command[0]) or command[0]
    start_s = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)!r}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=_variables(step, place, file_name), stdout=file,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Outcome(step.name, step.shows, "failed", 0.0, str(error))
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            _kill(process)
        except BaseException:
            _kill(process)
            raise
    seconds = round(time.monotonic() - start_s, 1)
    status, line = read(log.read_text(encoding="utf-8", errors="replace"), code, step.telling)
    if status == "timeout":
        line = f"not done after {limit_s:g} s; {line}"
    if place.packed:
        _pack(place.out)
    return Outcome(step.name, step.shows, status, seconds, line)


def read(text: str, code: int | None, telling: str) -> tuple[Status, str]:
    """Interpret an output and an exit status, which is ``None`` if the step was killed.

    Returns:
        The status, and the most informative line.
    """
    lines = [line.rstrip() for line in text.splitlines()[1:] if line.strip()]
    last = lines[-1].strip() if lines else "it printed nothing"
    if code is None:
        return "timeout", next((line.strip() for line in lines if _FRAME.match(line)), last)
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    ran = any(re.search(r"\d+ (passed|failed|error)", line) for line in lines[-2:])
    if skipped and not ran and code in (0, 5):
        return "skipped", skipped[0].partition(": ")[2]
    if code in NOTHING_DONE:
        return "skipped", next((line for line in lines if NOTHING_DONE[code] in line), last)
    if code:
        wrong = [line.strip() for line in lines if _WRONG.match(line)]
        named = [line for line in wrong if line.startswith("FAILED")]
        return "failed", (named or wrong or [f"exit status {code}: {last}"])[0]
    told = [line.strip() for line in lines if telling and re.search(telling, line)]
    return "ok", told[-1] if told else last


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each step."""
    return "\n".join(line_of(outcome) for outcome in outcomes)


def line_of(outcome: Outcome) -> str:
    return f"{outcome.step:<26}{outcome.status:<9}{outcome.seconds:>7.1f} s  {outcome.line[:110]}"


def _variables(step: Step, place: Place, file_name: str) -> Mapping[str, str]:
    folder = place.out / "nccl"
    folder.mkdir(exist_ok=True)
    found = {**os.environ, **ALWAYS, **step.variables}
    found["NCCL_DEBUG_FILE"] = str(folder / f"{file_name}.%h.%p.log")
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if place.nccl and step.shares_a_gpu:
        found["LD_PRELOAD"] = found["GPUDIST_NCCL_LIBRARY"] = place.nccl
        found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return found


def _which(tool: str) -> str | None:
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    return shutil.which(tool) or shutil.which(tool, path=str(cuda))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Let Python's processes leave their stacks, then kill all that the step has started."""
    # Those that torchrun starts are in sessions of their own.
    others = [pidfd for pid in _descendants(process.pid) if (pidfd := _opened(pid)) is not None]
    mine = os.pidfd_open(process.pid)
    for pidfd in (*others, mine):
        _signal(pidfd, signal.SIGABRT)
    # Not reaped, so that its number stays that of its group.
    select.select([mine], [], [], STACKS_S)
    for pidfd in (*others, mine):
        _signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _opened(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _signal(pidfd: int, number: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def _descendants(pid: int) -> list[int]:
    """Processes that this one, or one of them, has started, as far as they are still its own."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (OSError, UnicodeDecodeError):
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _pack(out: Path) -> None:
    kept = {out / "summary.json", out / ARCHIVE}
    left = sorted(path for path in out.rglob("*") if path.is_file() and path not in kept)
    with zipfile.ZipFile(out / ARCHIVE, "a", zipfile.ZIP_DEFLATED) as archive:
        for path in left:
            archive.write(path, path.relative_to(out))
            path.unlink()
