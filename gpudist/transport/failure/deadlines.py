"""Texts of the errors at a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpudist.errors import CollectiveTimeout
from gpudist.transport.host.processes import stopped_text


def deadline_text(doing: str, rank: int, timeout_s: float) -> str:
    """Return the beginning of a text: which operation was not complete."""
    return f"'{doing}' on rank {rank} was not complete after {timeout_s:g} s"


def missing_ranks(
    who: str, timeout_s: float, missing: Sequence[int], size: int, remedy: str
) -> CollectiveTimeout:
    """Return the error of a rank for which other ranks have not arrived."""
    return CollectiveTimeout(
        f"after {timeout_s:g} s {who} is still missing ranks {missing} of {size}; check that they "
        f"are running{remedy}"
    )


def last_operations(everyones: Sequence[Sequence[str] | None], pids: Mapping[int, int]) -> str:
    """Return the text of the last operations of each rank; ``None`` for one without an answer.

    Args:
        everyones: lines of each rank.
        pids: processes of the ranks on this node, of which the text names those that are stopped.
    """
    reports = [
        f"  rank {rank}: {'no answer' if lines is None else '; '.join(lines)}"
        + stopped_text(pids.get(rank, 0))
        for rank, lines in enumerate(everyones)
    ]
    text = "the last operations of each rank (none from one that is stopped or busy elsewhere):"
    return "\n".join([text, *reports])
