"""Whether every operator is right, and as fast as memory allows, on the machine it runs on."""

from gpudist.cli.self_check.cases import Case, cases
from gpudist.cli.self_check.check import Report, Result, check, verdict
from gpudist.cli.self_check.link_speeds import LinkSpeed
from gpudist.cli.self_check.remedies import of_failure

__all__ = ["Case", "LinkSpeed", "Report", "Result", "cases", "check", "of_failure", "verdict"]
