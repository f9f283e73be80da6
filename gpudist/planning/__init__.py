"""Predict how fast partitions are from plans, before any worker is started."""

from gpudist.convert.block_checkpoints import recompute
from gpudist.planning.advice import Advice, plan
from gpudist.planning.clock import Phase
from gpudist.planning.fitting import Fit, fits, smallest
from gpudist.planning.hardware import (
    BUILT_IN,
    CollectiveRates,
    ConvolutionRate,
    Link,
    Profile,
    profile_of,
)
from gpudist.planning.kernel_times import timed_kernels
from gpudist.planning.layout_search import search
from gpudist.planning.measuring import measured_profile
from gpudist.planning.picture import picture_of
from gpudist.planning.rehearsal import Memory, Rehearsal

__all__ = [
    "BUILT_IN",
    "Advice",
    "CollectiveRates",
    "ConvolutionRate",
    "Fit",
    "Link",
    "Memory",
    "Phase",
    "Profile",
    "Rehearsal",
    "fits",
    "measured_profile",
    "picture_of",
    "plan",
    "profile_of",
    "recompute",
    "search",
    "smallest",
    "timed_kernels",
]
