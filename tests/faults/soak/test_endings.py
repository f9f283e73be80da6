"""However a program ends, it ends in time, without a crash, with the right error on each rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpudist.transport.host.core_transport import is_built
from tests.faults.soak.nursery import End, Nursery

LIMIT_S = 60.0
SIZE = 2
# Exit status of each rank and its output, by program.
Expected = tuple[tuple[int, str], tuple[int, str]]
FINE: Expected = ((0, ""), (0, ""))
REFUSED: Expected = ((0, "refused: TransportError"), (0, "refused: TransportError"))
ENDINGS: dict[str, Expected] = {
    "just_returns": FINE,
    "leaves_everything_alive": FINE,
    "leaves_an_exchange_in_flight": FINE,
    "operates_after_everything_is_closed": REFUSED,
    "operates_while_the_interpreter_is_taken_down": ((0, "refused"), (0, "refused")),
    "raises": (
        (1, "rank 1 failed with ValueError: of the user's"),
        (1, "ValueError: of the user's"),
    ),
    "raises_in_backward": ((1, "rank 1 failed with ValueError"), (1, "ValueError: in backward")),
    "goes_on_after_an_error_in_backward": ((0, "caught: in backward"), (0, "caught: in backward")),
    "is_interrupted": ((-2, "interrupted after"), (1, "rank 0")),
    "forks": ((0, "went on"), (0, "went on")),
    "operates_in_a_forked_child": REFUSED,
    "loads_data_in_forked_workers": FINE,
    "leaves_a_thread_waiting": FINE,
    "operates_in_threads": FINE,
    "collects_in_odd_orders": FINE,
    "leaves_early": ((1, "rank 1"), (0, "")),
    "closes_and_goes_on": REFUSED,
}
# Where threads of gloo's own, or the store, could hold up the end.
OVER_GLOO = (
    "just_returns",
    "raises_in_backward",
    "is_interrupted",
    "forks",
    "operates_in_a_forked_child",
    "leaves_a_thread_waiting",
)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


CASES = [(name, "host") for name in ENDINGS] + [(name, "gloo") for name in OVER_GLOO]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, transport", CASES)
def test_ending(nursery: Nursery, name: str, transport: str) -> None:
    if transport == "host" and not is_built():
        pytest.skip("this installation has no native core")
    ends = nursery.run(f"tests.faults.soak.endings:{name}", SIZE, transport, LIMIT_S)
    for rank, (end, (code, text)) in enumerate(zip(ends, ENDINGS[name], strict=True)):
        check(f"{name} over {transport}, rank {rank}", end, code, text)


def check(where: str, end: End, code: int, text: str) -> None:
    assert end.code == code, (
        f"{where}: {end.code} and not {code} after {end.seconds:.1f} s\n{end.text}"
    )
    assert text in end.text, f"{where}: {end.text}"
    if code == 0:
        # Python prints this where it cannot raise an exception, torch and C++ where they abort.
        for word in ("Traceback", "ignored", "terminate called", "Fatal", "Warning"):
            assert word not in end.text, f"{where}: {end.text}"
