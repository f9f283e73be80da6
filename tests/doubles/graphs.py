"""Graphs of the double of CUDA's driver, captured from operators on torch's stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.doubles.nccl import nccl


class Graph:
    """A graph of all that is put on a stream in its ``with`` block, where nothing is carried out.

    Tensors made there live as long as the graph, as those of a graph's memory pool do: the works
    read and write them at each launch. What torch's own operators do to them is done once, at
    capture.
    """

    def __init__(self, stream: int | None = None) -> None:
        self._stream = stream
        self._number = 0
        self._pool = _Pool()

    def __enter__(self) -> Graph:
        self._number = nccl().gpudist_double_begin_capture(self._stream)
        assert self._number != 0
        self._pool.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._pool.__exit__(*details)
        result = nccl().gpudist_double_end_capture(self._number)
        if details[0] is not None:
            self.destroy()  # nobody else would
            return
        assert result == 0, f"the end of the capture returned {result}"

    def launch(self) -> None:
        """Put everything on the stream again, in the order in which it was captured."""
        result = nccl().gpudist_double_launch_graph(self._number, self._stream)
        assert result == 0, f"the launch returned {result}"

    def destroy(self) -> None:
        assert nccl().gpudist_double_destroy_graph(self._number) == 0
        self._pool.tensors.clear()


class _Pool(TorchDispatchMode):
    """Keep every tensor that torch creates alive."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else [result]
        self.tensors += [x for x in made if isinstance(x, torch.Tensor)]
        return result
