"""Measure the movements of a program: totals, ranges for profilers, a trace of all ranks."""

from gpudist.profiling.profile import profile
from gpudist.profiling.profiler_ranges import record_ranges
from gpudist.profiling.stats import Stat, Stats, stats

__all__ = ["Stat", "Stats", "profile", "record_ranges", "stats"]
