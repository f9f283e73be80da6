"""Whether every operator is right, and as fast as memory allows, on the machine it runs on."""

from gpudist.self_check.cases import Case, cases
from gpudist.self_check.check import Report, Result, check, verdict

__all__ = ["Case", "Report", "Result", "cases", "check", "verdict"]
