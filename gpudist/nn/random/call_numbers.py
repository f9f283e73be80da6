"""Numbers of a layer's calls; a call repeated by checkpointing gets its old number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from gpudist.cache import Cache
from gpudist.errors import GpudistError


@dataclass
class _NumberedCall:
    number: torch.Tensor
    repeated: bool = False
    ambiguous: bool = False


class CallNumbers:
    """Assigns numbers to calls, and recognizes calls repeated by checkpointing.

    Every call draws a token from torch's default CPU generator, whose state checkpointing restores
    before it repeats a call. A call in a backward pass repeats the earlier call with the same
    token.
    """

    def __init__(self) -> None:
        self._calls = Cache[int, _NumberedCall](4096)

    def __call__(self, counter: torch.Tensor, name: str) -> torch.Tensor:
        """Return the number of this call; a new call takes the ``counter`` and increments it.

        Raises:
            GpudistError: in a backward pass, if it is unclear which call is repeated.
        """
        # Transforms of torch.func must not track the counter.
        with temporarily_clear_interpreter_stack():
            return self._number(counter, name)

    def _number(self, counter: torch.Tensor, name: str) -> torch.Tensor:
        token = int(torch.randint(1 << 62, ()).item())
        call = self._calls.get(token)
        if torch._C._current_graph_task_id() != -1:  # pyright: ignore
            if call is None or call.ambiguous:
                raise GpudistError(
                    f"{name}: called in a backward pass, but it is unclear which earlier call "
                    "this repeats; use torch.utils.checkpoint with preserve_rng_state=True and "
                    "call torch.manual_seed only between forward passes"
                )
            call.repeated = True
            return call.number
        number = counter.clone()
        counter.add_(1)
        # Seeding before each step reproduces the tokens of finished steps.
        unclear = call is not None and not call.repeated
        self._calls[token] = _NumberedCall(number, ambiguous=unclear)
        return number
