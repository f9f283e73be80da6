"""Training steps of converted networks with and without optimizations for CPUs."""

from __future__ import annotations

from functools import partial

from benchmarks.case import Case, Side
from benchmarks.networks import Problem, case_of
from benchmarks.training import Step, Training, is_right
from gpudist import recycling
from gpudist.nn.norm import lines
from gpudist.nn.utils import use_onednn
from gpudist.world.partition import Partition

NETWORKS = ("U-Net 32^3", "U-Net 64^3", "ResNet-18 64^2")
MOST_THREADS, LIMIT_BYTES = lines.MOST_THREADS, recycling.statistics().limit_bytes
# Name of each side, and whether it uses oneDNN's convolutions, the native core's norms and the
# memory pool.
WITHOUT = {
    "gpudist": (True, True, True),
    "without oneDNN": (False, True, True),
    "without native norms": (True, False, True),
    "without recycling": (True, True, False),
}


def cases(ranks: int) -> list[Case]:
    """Return the cases. Shapes are global; bytes are a rank's block of the input."""
    return [case_of("kernels", name, ranks) for name in NETWORKS]


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the loss and the gradients."""
    problem = Problem(**case.parameters)
    found: dict[str, Side] = {}
    for name, switches in WITHOUT.items():
        training = problem.converted(P_world)
        found[name] = Side(
            partial(_step, training, *switches),
            lambda step: is_right(step, problem.expected),
            training.start_again,
        )
    return found


def _step(training: Training, onednn: bool, native_norms: bool, recycles: bool) -> Step:
    use_onednn(onednn)
    lines.MOST_THREADS = MOST_THREADS if native_norms else 0
    recycling.set_limit(LIMIT_BYTES if recycles else 0)
    return training.step()
