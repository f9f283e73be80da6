"""Peak memory of a training step of a GPT: the sequential network, our ranks and DTensor's.

``python -m benchmarks.transformer_memory --json FILE``. Each side runs in new processes, as in
:mod:`benchmarks.network_memory`. The memory resident once the network exists is subtracted from the
peak and reported beside it. A step of a small network runs first, so that persistent memory of
libraries is already allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import transformer
from benchmarks.network_memory import RUN_S, Peak
from benchmarks.peers import dtensor
from benchmarks.resident import forget_peak, status_mib
from benchmarks.training import Training
from benchmarks.worlds import NEW, ROOT
from examples.gpt import Sizes
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition

SMALL, LARGE = Sizes(64, 8, 16, 4, 1), Sizes(8192, 256, 512, 8, 4)
SIDES = ("sequential", "gpudist", "dtensor")


def make(side: str, sizes: Sizes, P_world: Partition) -> Training:
    if side == "sequential":
        return transformer.sequential(sizes)
    if side == "gpudist":
        return transformer.parallel(sizes, P_world)[1]
    return transformer.dtensor(sizes, dtensor.mesh(P_world))


def step(P_world: Partition, side: str) -> Peak:
    """Run forward, backward and an update."""
    torch.set_num_threads(1)
    make(side, SMALL, P_world).step()
    training = make(side, LARGE, P_world)
    P_world.barrier()
    before_mib = status_mib("VmRSS")
    forget_peak()
    training.step()
    return Peak(before_mib, status_mib("VmHWM") - before_mib)


def measured(side: str, ranks: int) -> list[Peak]:
    """Measure every rank of a new world, in new processes."""
    command = [sys.executable, "-m", "benchmarks.transformer_memory"]
    command += ["--ranks", str(ranks), "--side", side]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **NEW.environment}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [Peak(**peak) for peak in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    options = _options()
    if options.side is not None:
        arguments = (options.ranks, options.side)
        peaks = run_distributed(step, *arguments, transport="host", timeout=RUN_S)
        print(json.dumps([asdict(peak) for peak in peaks]))
        return 0
    peaks = {side: measured(side, 1 if side == "sequential" else options.ranks) for side in SIDES}
    print(f"{LARGE}, {transformer.SAMPLES} samples, one training step, {options.ranks} ranks:")
    for side, of_ranks in peaks.items():
        highest = max(of_ranks, key=lambda peak: peak.before_mib + peak.peak_mib)
        print(
            f"{side}: at most {highest.before_mib:.0f} MiB before the step on a rank, and "
            f"{highest.peak_mib:.0f} MiB more in it"
        )
    if options.json:
        record = {side: [asdict(peak) for peak in of_ranks] for side, of_ranks in peaks.items()}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transformer_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
