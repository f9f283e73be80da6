"""Compare descriptions between ranks, and share texts and errors."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from gpudist.errors import CheckpointError
from gpudist.world.partition import Partition
from gpudist.world.texts import different_texts, gather_texts


def broadcast_text(P: Partition, text: str | None, root: int) -> str:
    """Broadcast the text of rank ``root``; others pass ``None``. Collective over ``P``."""
    data = (text or "").encode(errors="surrogatepass")
    padded = data.ljust(-(-len(data) // 8) * 8, b"\0")
    words = [len(data), *array("q", padded)] if P.rank == root else None
    length, *received = P.broadcast_data(words, root)
    return array("q", received).tobytes()[:length].decode(errors="surrogatepass")


def require_alike(P: Partition, what: str, text: str) -> None:
    """Raise on every rank unless all have the same ``text``. Collective over ``P``.

    Raises:
        CheckpointError: the error names the first rank whose text differs from that of rank 0.
    """
    texts = different_texts(P, text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise CheckpointError(
                f"{what} of rank {rank} differ from those of rank 0; build the same model on "
                "every rank, also on ranks without a part in it"
            )


class ReplacedError(CheckpointError):
    """The files that a rank reads have been removed or replaced since it read the index."""


@contextmanager
def failing_together(P: Partition, what: str) -> Iterator[None]:
    """Raise on every rank if the body raises on one, once all are done. Collective over ``P``.

    The body must not communicate.

    Raises:
        ReplacedError: on every rank, with the text of the first rank that failed, if it raised it.
        CheckpointError: on every rank, with that text, if it raised any other error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # The error is raised again below, on every rank.
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    if isinstance(failure, CheckpointError):
        text = str(failure)
    # The first byte says which error it is.
    kind = b"" if failure is None else b"\1" if isinstance(failure, ReplacedError) else b"\0"
    answers = gather_texts(P, (kind + text.encode(errors="backslashreplace"))[:4096])
    for rank, data in enumerate(answers):
        if data:
            raised = ReplacedError if data[0] == 1 else CheckpointError
            text = data[1:].decode(errors="replace")
            raise raised(f"{what}: rank {rank}: {text}") from failure
