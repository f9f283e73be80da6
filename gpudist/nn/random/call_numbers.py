"""The number of a layer's call, the same again where checkpointing repeats the call."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from gpudist.errors import GpudistError

_REMEMBERED_CALLS = 4096


@dataclass
class _Call:
    number: torch.Tensor
    repeated: bool = False
    ambiguous: bool = False


class CallNumbers:
    """Knows a repeated call by torch's generator, which checkpointing sets back before.

    Every call draws a token from torch's default generator on the CPU. A call in a backward pass is
    a repetition of the one that drew the same token.
    """

    def __init__(self) -> None:
        self._calls: OrderedDict[int, _Call] = OrderedDict()

    def __call__(self, counter: torch.Tensor, name: str) -> torch.Tensor:
        """The number of this call: of a new one the ``counter``, which is increased.

        Raises:
            GpudistError: in a backward pass, if it is unclear which call is repeated.
        """
        # Transforms of torch.func are not to see the counter.
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
        # Whoever seeds anew before each step repeats the tokens of steps that are over.
        unclear = call is not None and not call.repeated
        self._calls[token] = _Call(number, ambiguous=unclear)
        self._calls.move_to_end(token)
        if len(self._calls) > _REMEMBERED_CALLS:
            self._calls.popitem(last=False)
        return number
