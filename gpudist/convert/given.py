"""Compare what workers give a network, and what the network does, in the headers of messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from gpudist.checks.bits import digests_of, has_bits
from gpudist.convert.inputs import Entrance, leaves_by_name
from gpudist.errors import PlanMismatch, side_by_side
from gpudist.sbp.done import done, text_of_part
from gpudist.world.texts import different_texts

# Maximum size of a CPU tensor, given whole, whose values are compared at every call.
SMALL_BYTES = 256
_NUMBERS = (int, float, complex, np.generic)


class Given:
    """Digests of what the workers of a network give it and do, folded into the headers of messages.

    This sends no message, and reads no memory of a device. Under ``GPUDIST_CHECK=1`` the workers
    also compare at every call, with large tensors given whole, and an error names the first
    difference.

    Args:
        entrance: converts the network's inputs.
        settings: arguments of the conversion, equal on all workers.
    """

    def __init__(self, entrance: Entrance, settings: Sequence[object]) -> None:
        P_x, self._entrance = entrance.P_x, entrance
        self._P_x, self._wire, self._dims = P_x, P_x.wire, P_x.dim
        self._peers = [rank for rank in P_x.ranks if rank != P_x.wire.rank] if P_x.active else []
        self._settings = f"{[*settings]} and inputs {sorted(entrance.inputs.items())}"
        self._name = ""
        self._number = 0

    def name_network(self, network: torch.nn.Module) -> None:
        """Number a network on which the workers have agreed, in the order of all networks."""
        remembered: Any = self._wire.remembered
        self._name = type(network).__name__
        self._number = remembered["networks"] = remembered.get("networks", 0) + 1

    def inputs(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[bytes] | None:
        """Fold the inputs of a call, and return a list for the parts of what the network does.

        Returns:
            ``None`` if nothing is compared: with one worker; in a backward, which may repeat a part
            of the forward; and in a capture, in which a worker may fail alone.
        """
        is_captured = self._wire.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        is_repeated = torch._C._current_graph_task_id() != -1  # pyright: ignore
        if not self._peers or done.is_off or is_repeated or is_captured:
            return None
        parts = [f"network {self._number} with {self._settings}".encode()]
        holds_blocks = not (kwargs or self._entrance.inputs)
        for x in args:
            holds_blocks = holds_blocks and type(x) is torch.Tensor and x.dim() == self._dims
        if not holds_blocks:
            parts += self._whole_leaves(leaves_by_name(function, args, kwargs))
        self.fold("inputs", parts)
        return []

    def fold(self, what: str, parts: Sequence[bytes]) -> None:
        """Fold parts of what the network was given, or of what it did."""
        if self._wire.compares_every_call:
            self._compare(what, parts)
        digest = blake2b(b"\0".join(parts), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        self._wire.fold(self._peers, number, f"the {what} of {self._name}")

    def _whole_leaves(self, leaves: Sequence[tuple[str, Any]]) -> list[bytes]:
        parts: list[bytes] = []
        for name, x in leaves:
            if isinstance(x, _NUMBERS):
                parts.append(f"{name}={x!r}".encode())
            elif isinstance(x, torch.Tensor) and self._entrance.is_held_by_all(name, x):
                text = f"{name}={x.dtype} {list(x.shape)}"
                if has_bits(x) and x.device.type == "cpu" and x.nbytes <= SMALL_BYTES:
                    text += f" {x.tolist()}"  # pyright: ignore
                elif has_bits(x) and self._wire.compares_every_call:
                    text += f" with digest {digests_of([x])}"
                parts.append(text.encode())
        return parts

    def _compare(self, what: str, parts: Sequence[bytes]) -> None:
        texts = different_texts(self._P_x, json.dumps([text_of_part(part) for part in parts]))
        for views in zip_longest(*map(json.loads, texts), fillvalue="nothing"):
            if len(set(views)) > 1:
                raise PlanMismatch(
                    f"{self._name}: workers disagree about the {what} of the network, at first in"
                    f"{side_by_side(dict(zip(self._P_x.ranks, views, strict=True)))}\ngive "
                    "every worker equal numbers, whole tensors, modes and rates"
                )
