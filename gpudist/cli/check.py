"""``gpudist check``: test every operator on this machine, and print a verdict."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from gpudist.cli.command import print_json
from gpudist.cli.progress import Progress
from gpudist.cli.self_check import LinkSpeed, Report, Result, check, failure_remedy, verdict
from gpudist.cli.tables import print_columns, print_table, print_text
from gpudist.errors import PartitionError, TransportError
from gpudist.testing import run_distributed
from gpudist.world import runtime
from gpudist.world.partition import Partition

TIMEOUT_S = 120.0


def run(arguments: argparse.Namespace) -> int:
    """Check every operator; return exit status 0 if all are right, else 1."""
    if arguments.ranks < 1 or arguments.mib < 1:
        raise PartitionError(
            f"--ranks is {arguments.ranks} and --mib {arguments.mib}; both must be at least 1"
        )
    try:
        report, speaks = _report(arguments)
    except TransportError as error:
        words, remedy = f"Ranks could not exchange data: {error}", failure_remedy(str(error))
        remedies = [remedy] if remedy else []
        if arguments.json:
            print_json({"passed": False, "verdict": words, "remedies": remedies})
        else:
            print_text(f"verdict: {words}")
            _print_remedies(remedies)
        return 1
    if speaks:
        _show(report, arguments.json)
    return 0 if report.passed else 1


def _report(arguments: argparse.Namespace) -> tuple[Report, bool]:
    """Return the report, and whether this process prints it."""
    if runtime.launch().launcher != "none":
        P_world = runtime.init(timeout=TIMEOUT_S)
        return check(P_world, arguments.mib, Progress(P_world.rank == 0)), P_world.rank == 0
    reports = run_distributed(
        _check_rank, arguments.ranks, arguments.mib, arguments.json, timeout=TIMEOUT_S
    )
    return reports[0], True


def _check_rank(P_world: Partition, mebibytes: int, quiet: bool) -> Report:
    return check(P_world, mebibytes, Progress(P_world.rank == 0 and not quiet))


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        results = [{**asdict(r), "passed": r.passed, "is_slow": r.is_slow} for r in report.results]
        facts = {**asdict(report), "results": results}
        print_json({**facts, "passed": report.passed, "verdict": verdict(report)})
        return
    print_table(
        [
            ("ranks", str(report.ranks)),
            ("transport", f"{report.transport}, on {report.device}"),
            ("plain copy", f"{report.copy_gbps:.2f} GB/s a rank, all ranks at once"),
        ]
    )
    print()
    print_columns(
        ("operator", "exact", "dot test", "time us", "GB/s", "of a copy"),
        [_line(result) for result in report.results],
    )
    print()
    if report.links:
        print_columns(
            ("ranks", "link", "right", "GB/s each way"),
            [_link(*both) for both in zip(report.links, report.kinds, strict=True)],
        )
        print()
    print_text(f"verdict: {verdict(report)}")
    _print_remedies(report.remedies)
    if report.transport == "loopback":
        print_text(
            "note: these ranks were threads of one process that take turns. To check the transport "
            "that training would use:"
        )
        print("  torchrun --standalone --nproc-per-node 4 -m gpudist check")


def _link(link: LinkSpeed, kind: str) -> tuple[str, ...]:
    right = "yes" if link.right else "NO"
    return f"{link.first} and {link.second}", kind or "-", right, f"{link.gbps:.2f}"


def _print_remedies(remedies: Sequence[str]) -> None:
    for remedy in remedies:
        print_text(f"remedy: {remedy}")


def _line(result: Result) -> tuple[str, ...]:
    return (
        result.name,
        "yes" if result.exact else "NO",
        f"{result.adjoint_error:.0e}" + ("" if result.passed or not result.exact else " WRONG"),
        f"{result.time_us:.0f}",
        f"{result.gbps:.2f}",
        f"{result.share:.0%}" + (" slow" if result.is_slow else ""),
    )
