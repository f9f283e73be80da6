"""Run steps in processes of their own and within their limits, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

from tests.gpu import REHEARSED
from tests.gpu.first import processes
from tests.gpu.first.steps import Step

ROOT = Path(__file__).resolve().parents[3]
Status = Literal["ok", "failed", "timeout", "skipped"]
# A command that could not even begin its work, by its exit status; 5 is pytest's without tests.
NOTHING_DONE = {3: "nothing is", 5: "no tests ran"}
ARCHIVE, SUMMARY, TABLE = "logs.zip", "summary.json", "table.txt"
# Limits are those of a machine with a GPU and nothing else to do.
REHEARSAL_PATIENCE = 6
LEAST_S = 10.0
# Processes on one GPU take turns, and ranks wait for each other's.
MOST_SHARING = 2
ALWAYS = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,REG"}
_WRONG = re.compile(r"^(FAILED|ERROR|E  +\S|error:|\w*(Error|Exception)\b|make: \*\*\*)")
_FRAME = re.compile(r'^  File "')
_PROBE = (
    "import json; from tests.gpu.devices import gpus, why_no_gpu_is_shared; "
    "print(json.dumps([gpus(), why_no_gpu_is_shared()]))"
)


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
        out: folder of the summary, the table and the archive of all logs.
        logs: folder of the logs, not in ``out``.
        rehearsal: whether the doubles replace CUDA and NCCL.
        budget_s: time for all steps together; no step begins after it.
        nccl: libnccl for ranks that share a GPU; the default one if empty.
        is_built: whether the native core is there already.
        commit: of the code, for rows of results.
        beside: how many steps run at once.
    """

    out: Path
    logs: Path
    rehearsal: bool = False
    budget_s: float = float("inf")
    nccl: str = ""
    is_built: bool = False
    commit: str = ""
    beside: int = 6
    _write: threading.Lock = field(default_factory=threading.Lock)
    _ask: threading.Lock = field(default_factory=threading.Lock)
    _answers: list[tuple[int, str]] = field(default_factory=list)

    def devices(self) -> tuple[int, str]:
        """Return the number of GPUs, and why several ranks cannot share one; asked once."""
        with self._ask:
            if not self._answers:
                self._answers.append(self._asked())
        return self._answers[0]

    def _asked(self) -> tuple[int, str]:
        if self.rehearsal:
            return int(os.environ.get(REHEARSED, "0")), ""
        log = self.logs / "devices.log"
        with suppress(processes.Late, OSError, ValueError, IndexError):
            command = [sys.executable, "-c", _PROBE]
            processes.run(command, ROOT, _shared(_variables(self), self), log, 60, 60)
            number, reason = json.loads(log.read_text(errors="replace").splitlines()[-1])
            return int(number), str(reason)
        return 0, f"the devices are unknown: {log.name}"


def run_all(
    chosen: Sequence[Step], place: Place, say: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Run the steps, those beside each other that may be; all is written after each."""
    for folder in (place.out, place.logs):
        folder.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + place.budget_s
    outcomes: dict[str, Outcome] = {}

    def one(step: Step) -> None:
        left_s = deadline_s - time.monotonic()
        why = why_skipped(step, place)
        if not why and left_s < LEAST_S:
            why = f"no time is left of {place.budget_s:g} s; --from '{step.name}' goes on here"
        if why:
            outcome = Outcome(step.name, step.shows, "skipped", 0.0, why)
        else:
            outcome = run(step, place, left_s)
        with place._write:
            outcomes[step.name] = outcome
            write([outcomes[s.name] for s in chosen if s.name in outcomes], place)
            say(outcome)

    for batch in batches(chosen, place):
        beside = min(place.beside, MOST_SHARING) if batch[0].shares_a_gpu else place.beside
        with ThreadPoolExecutor(beside) as pool:
            list(pool.map(one, batch))
    return [outcomes[step.name] for step in chosen]


def batches(chosen: Sequence[Step], place: Place) -> Iterator[list[Step]]:
    """Yield steps that run beside each other, in order; a rehearsal measures nothing."""

    def kind(step: Step) -> tuple[bool, bool]:
        return (False, False) if place.rehearsal else (step.alone, step.shares_a_gpu)

    for (is_alone, _), group in groupby(chosen, kind):
        steps = list(group)
        yield from [[step] for step in steps] if is_alone else [steps]


def why_skipped(step: Step, place: Place) -> str:
    """Explain what a step lacks here; empty if it can run."""
    missing = [tool for tool in step.tools if not _which(tool)]
    if missing:
        return f"not found: {', '.join(missing)}"
    if place.rehearsal and not step.rehearsed:
        return "not over the doubles"
    if step.name == "build" and place.is_built:
        return "the native core came along"
    if step.gpus > 1 and place.devices()[0] < step.gpus:
        return f"needs {step.gpus} GPUs, and there are {place.devices()[0]}"
    if step.shares_a_gpu:
        return place.devices()[1]
    return ""


def run(step: Step, place: Place, left_s: float) -> Outcome:
    """Run one step, its output in a log of its name."""
    log = place.logs / f"{_file_name(step)}.log"
    command = [*step.command, *(step.smallest if place.rehearsal else ())]
    gpus = place.devices()[0] if step.gpus > 1 else 1
    command = [part.format(logs=place.logs, gpus=gpus, commit=place.commit) for part in command]
    command[0] = _which(command[0]) or command[0]
    log.write_text(f"$ {shlex.join(command)!r}\n", encoding="utf-8")
    patience = REHEARSAL_PATIENCE if place.rehearsal else 1
    limit_s = min(step.limit_s * patience, left_s)
    start_s, code, late = time.monotonic(), None, ""
    try:
        variables = _variables(place, step)
        code = processes.run(command, ROOT, variables, log, limit_s, step.quiet_s * patience)
    except processes.Late as error:
        late = f"{error}; "
    except OSError as error:
        return Outcome(step.name, step.shows, "failed", 0.0, str(error))
    seconds = round(time.monotonic() - start_s, 1)
    status, line = read(log.read_text(encoding="utf-8", errors="replace"), code, step.telling)
    return Outcome(step.name, step.shows, status, seconds, late + line)


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
    return "\n".join(map(line_of, outcomes))


def line_of(outcome: Outcome) -> str:
    return f"{outcome.step:<24}{outcome.status:<9}{outcome.seconds:>7.1f} s  {outcome.line[:110]}"


def write(outcomes: Sequence[Outcome], place: Place) -> None:
    """Write the summary, the table and the archive, each whole before it takes its name."""
    text = json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n"
    _replace(place.out / SUMMARY, lambda path: path.write_text(text, encoding="utf-8"))
    lines = table(outcomes) + "\n"
    _replace(place.out / TABLE, lambda path: path.write_text(lines, encoding="utf-8"))

    def pack(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for log in sorted(place.logs.rglob("*")):
                # A step that still runs may remove its own.
                with suppress(FileNotFoundError):
                    archive.write(log, log.relative_to(place.logs))

    _replace(place.out / ARCHIVE, pack)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    part = path.with_name(f"{path.name}.part")
    make(part)
    part.replace(path)


def _variables(place: Place, step: Step | None = None) -> dict[str, str]:
    found = {**os.environ, **ALWAYS}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if step is None:
        return found
    if not step.alone:
        folder = place.logs / "nccl"
        folder.mkdir(exist_ok=True)
        found.update(NCCL_LOG, NCCL_DEBUG_FILE=str(folder / f"{_file_name(step)}.%h.%p.log"))
    found.update(step.variables)
    return dict(_shared(found, place)) if step.shares_a_gpu else found


def _shared(variables: Mapping[str, str], place: Place) -> Mapping[str, str]:
    if not place.nccl:
        return variables
    names = ("LD_PRELOAD", "GPUDIST_NCCL_LIBRARY")
    return {**variables, **dict.fromkeys(names, place.nccl), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def _file_name(step: Step) -> str:
    return re.sub(r"\W+", "-", step.name)


def _which(tool: str) -> str | None:
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    return shutil.which(tool) or shutil.which(tool, path=str(cuda))
