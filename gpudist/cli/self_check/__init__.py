"""Check that every operator is correct and fast on this machine."""

from gpudist.cli.self_check.cases import Case, cases
from gpudist.cli.self_check.link_speeds import LinkSpeed
from gpudist.cli.self_check.remedies import failure_remedy
from gpudist.cli.self_check.run_cases import Report, Result, check, verdict

__all__ = ["Case", "LinkSpeed", "Report", "Result", "cases", "check", "failure_remedy", "verdict"]
