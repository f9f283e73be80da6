"""Measure a program's movements: totals, ranges in other profilers, a trace of all ranks."""

from gpudist.profiling.profile import profile
from gpudist.profiling.profiler_ranges import record_ranges
from gpudist.profiling.stats import Stat, Stats, stats

__all__ = ["Stat", "Stats", "profile", "record_ranges", "stats"]
