"""The example of resumed training, with workers killed at random.

    python -m tests.examples.killed_training --kills 10 --seed 1

Exits with 1 unless the training ends with every loss and the network as without kills.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpudist.testing import run_distributed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "resume.py"
# Kills happen in this first fraction of the steps, so the last comes before the end.
_KILLED_PART = 0.7
_STARTING_SHARE = 0.3
_STARTING_S = 2.0
_STEP_S = 0.03
_PATIENCE_S = 120.0
_POLL_S = 0.002


@dataclass
class Outcome:
    """Result of a training.

    Attributes:
        digest: digest of the network.
        losses: losses of each step, one for each time it ran.
        kills: place of each kill: a step, or ``"while starting"``.
    """

    digest: str
    losses: dict[int, list[str]]
    kills: list[str]

    @property
    def repeated(self) -> int:
        """Steps that were done more than once."""
        return sum(len(found) > 1 for found in self.losses.values())


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Describe everything that is not bitwise equal."""
    texts = []
    if found.digest != expected.digest:
        texts.append(f"the network is {found.digest}, not {expected.digest}")
    if found.losses.keys() != expected.losses.keys():
        texts.append(f"the steps are {sorted(found.losses)}, not {sorted(expected.losses)}")
    for step, values in sorted(found.losses.items()):
        wrong = set(values) - set(expected.losses.get(step, []))
        texts += [f"the loss of step {step} is {value}" for value in sorted(wrong)]
    return texts


def on_threads(folder: Path, ranks: int, steps: int, every: int) -> Outcome:
    """Train on threads of this process, without kills."""
    spec = importlib.util.spec_from_file_location("resume", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        digest = run_distributed(module.train, ranks, folder, steps, every)[0]
    finally:
        torch.use_deterministic_algorithms(before)
    return Outcome(digest, losses_in(folder), [])


def killed(
    folder: Path,
    ranks: int,
    steps: int,
    every: int,
    kills: int,
    seed: int,
    python: str = sys.executable,
) -> Outcome:
    """Start a training under torchrun, and kill its workers one after the other.

    Args:
        folder: folder of the training.
        ranks: number of workers.
        steps: number of steps.
        every: number of steps between checkpoints.
        kills: number of kills.
        seed: of their times.
        python: command of a worker.

    Raises:
        RuntimeError: it failed, or ended before all kills.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher += ["--max-restarts", str(kills), "--no-python", python, str(EXAMPLE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    lengths = ["--steps", str(steps), "--every", str(every)]
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *launcher, "--folder", str(folder), *lengths],
            stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            done = _kill_workers(process, folder, ranks, steps, kills, random.Random(seed))
            status = process.wait(_PATIENCE_S)
        finally:
            # The workers are killed too, also if the test failed.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        text = output.read()
    if status != 0 or len(done) < kills:
        raise RuntimeError(f"status {status} after {len(done)} of {kills} kills {done}:\n{text}")
    return Outcome(text.rpartition(": ")[2].strip(), losses_in(folder), done)


def losses_in(folder: Path) -> dict[int, list[str]]:
    """Whole lines: a worker may have been killed in one."""
    found: dict[int, list[str]] = {}
    lines = (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else []
    for line in lines:
        step, _, loss = line.partition(" ")
        found.setdefault(int(step), []).append(loss)
    return found


def _kill_workers(
    process: subprocess.Popen[bytes],
    folder: Path,
    ranks: int,
    steps: int,
    kills: int,
    chance: random.Random,
) -> list[str]:
    """Return the places of the kills: fewer than ``kills`` if the training ends first."""
    at = sorted(chance.sample(range(1, int(_KILLED_PART * steps)), kills))
    done: list[str] = []
    before: set[int] = set()
    for step in at:
        starting = chance.random() < _STARTING_SHARE
        while process.poll() is None:
            workers = _workers_of(process.pid)
            is_new = len(workers) == ranks and not workers & before
            if is_new and (starting or max(losses_in(folder), default=-1) >= step):
                break
            time.sleep(_POLL_S)
        else:
            return done
        time.sleep(chance.uniform(0, _STARTING_S if starting else _STEP_S))
        before = _workers_of(process.pid)
        if not before:
            return done
        os.kill(chance.choice(sorted(before)), signal.SIGKILL)
        done.append("while starting" if starting else f"step {max(losses_in(folder))}")
    return done


def _workers_of(launcher: int) -> set[int]:
    """Return the processes that torchrun has started and that have not died."""
    found = set()
    # The folder does not exist once the training has ended, and a worker may end at any time.
    with suppress(OSError):
        tasks = Path(f"/proc/{launcher}/task").iterdir()
        children = [pid for task in tasks for pid in (task / "children").read_text().split()]
        for pid in children:
            with suppress(OSError):
                if EXAMPLE.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the workers have: sums of another cut have other bits
    shape = (options.ranks, options.steps, options.every)
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / name for name in ("whole", "killed")]
        for folder in folders:
            folder.mkdir()
        expected = on_threads(folders[0], *shape)
        start_s = time.monotonic()
        found = killed(folders[1], *shape, options.kills, options.seed)
    seconds = time.monotonic() - start_s
    texts = differences(found, expected)
    print(
        f"{len(found.kills)} workers killed ({', '.join(found.kills)}) in {seconds:.0f} s; "
        f"{found.repeated} of {options.steps} steps repeated"
    )
    print("\n".join(texts) or f"bitwise equal: {found.digest}")
    if options.json:
        facts = {name: getattr(options, name) for name in ("ranks", "steps", "every", "seed")}
        facts |= {"kills": found.kills, "steps_repeated": found.repeated, "differences": texts}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return bool(texts)


if __name__ == "__main__":
    sys.exit(main())
