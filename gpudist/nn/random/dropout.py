"""Distributed dropout: the same cells are dropped under every partition."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any, Literal

import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange.library import define, handles_of, is_recorded, thing_of
from gpudist.geometry.boxes import Box
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.parameters.placement import Placement
from gpudist.nn.random.call_numbers import CallNumbers
from gpudist.nn.random.cells import kept_by_index, kept_by_torch
from gpudist.ops.agreement import Agreement, ShapeMode
from gpudist.ops.bound import Bound
from gpudist.world.partition import CartesianPartition

Generator = Literal["index", "torch"]

_NO_SEED = -1
# Of SELU, to whose outputs alpha dropout belongs: minus the scale times its alpha.
_ALPHA = 1.7580993408473766


class _DistributedDropout(DistributedModule):
    """Drops cells of a tensor on ``P_x`` at random, each with all cells of the dims behind.

    Args:
        leading_dims: of the tensor, those along which cells are dropped one by one.
    """

    seed: torch.Tensor | None
    calls: torch.Tensor | None
    # Names that the state dict of the sequential layer does not have.
    _beyond_sequential = ("seed", "calls")
    _shown = ("generator",)

    def __init__(
        self,
        P_x: CartesianPartition,
        p: float,
        inplace: bool,
        seed: int | None,
        generator: Generator,
        global_shape: Sequence[int] | None,
        shape: ShapeMode,
        leading_dims: int,
    ) -> None:
        super().__init__()
        self._name = type(self).__name__
        self._require(P_x, p, inplace, seed, generator)
        self.P_x, self.p, self.generator = P_x, p, generator
        self.inplace = inplace
        self._leading_dims = leading_dims
        by_index = generator == "index"
        first = _NO_SEED if seed is None else seed
        self.register_buffer("seed", torch.tensor(first) if by_index else None)
        self.register_buffer("calls", torch.tensor(0) if by_index else None)
        self._numbers = CallNumbers()
        self._seed_agreed = seed is not None
        self._agreement = Agreement(self._name, P_x, P_x, P_x.dim, global_shape, shape)
        self._bound = Bound[tuple[Box, tuple[int, ...]]](shape, self._agreement)

    def _require(
        self,
        P_x: CartesianPartition,
        p: float,
        inplace: bool,
        seed: int | None,
        generator: Generator,
    ) -> None:
        if not 0 <= p <= 1:
            raise ShapeError(f"{self._name}: p is {p} but must be a probability, from 0 to 1")
        if inplace:
            raise ShapeError(f"{self._name}: inplace is not supported; outputs are new tensors")
        if generator not in ("index", "torch"):
            raise ShapeError(f"{self._name}: generator is {generator!r}; use 'index' or 'torch'")
        if generator == "torch" and seed is not None:
            raise ShapeError(
                f"{self._name}: generator 'torch' draws from torch's own, which torch.manual_seed "
                "seeds; leave out seed"
            )
        if generator == "torch" and P_x.device.type != "cpu":
            raise ShapeError(
                f"{self._name}: generator 'torch' is for a CPU, but the partition's device is "
                f"{P_x.device}; use 'index'"
            )
        if seed is not None and not 0 <= seed < 1 << 63:
            raise ShapeError(f"{self._name}: seed is {seed} but must be at least 0, below 2^63")

    def _placements(self) -> dict[str, Placement]:
        placed = Placement.everywhere((), self.P_x.world)
        return {name: placed for name, _ in self.named_buffers(recurse=False)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input.clone()
        if self.p == 1:
            return input * torch.zeros((), dtype=input.dtype, device=input.device)
        if is_recorded(input):
            (layer,) = handles_of(self)
            kept = torch.ops.gpudist.dropout_kept(layer, input, None)[0]
        else:
            kept = self.kept(input)
        return self._dropped(input, kept) if self.P_x.active else input.clone()

    def _dropped(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """``x`` without what is not kept, with the mean it had."""
        # Torch rounds the factor to the dtype; the mask is what is saved for backward.
        factor = torch.ones((), dtype=x.dtype, device=x.device).div_(1 - self.p)
        return x * kept * factor

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """What this call keeps of the block ``x``, of bool; dims behind the leading ones are 1."""
        whole = self.kept_shape(x.shape)
        if not self.P_x.active:
            self._number()
            return x.new_empty(whole, dtype=torch.bool)
        box, shape = self._bound(x, self._agree)
        call = self._number()
        if call is None or self.seed is None:
            return kept_by_torch(box, shape, self.p).view(whole)
        return kept_by_index(self.seed, call, box, shape, self.p, x.device).view(whole)

    def _number(self) -> torch.Tensor | None:
        """This call's, counted by all workers, so that generators and state dicts stay alike."""
        return None if self.calls is None else self._numbers(self.calls, self._name)

    def kept_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of `kept` of a block of this shape."""
        leading = self._leading_dims
        return (*shape[:leading], *(1,) * (len(shape) - leading))

    def _agree(self, x: torch.Tensor) -> tuple[Box, tuple[int, ...]]:
        """The box of this worker, and the global shape, of the leading dims."""
        index, leading = self.P_x.index, self._leading_dims
        assert index is not None
        cut = self._agreement(x).decomposition
        if not self._seed_agreed and self.seed is not None:
            self.seed.fill_(self._agreed_seed(int(self.seed.item())))
        self._seed_agreed = True
        box = cut.block(index)
        return Box(box.start[:leading], box.stop[:leading]), cut.shape[:leading]

    def _agreed_seed(self, seed: int) -> int:
        """The first worker's; if it has none, what torch's generator would draw there next."""
        if seed == _NO_SEED:
            generator = torch.Generator()
            generator.set_state(torch.get_rng_state())
            seed = int(torch.randint(1 << 62, (), generator=generator).item())
        return self.P_x.broadcast_data([seed])[0]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any
    ) -> None:
        # The sequential layer has no state: this one keeps its own.
        for name, buffer in self.named_buffers(recurse=False):
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)


def _fake_kept(layer: int, x: torch.Tensor) -> list[torch.Tensor]:
    return [x.new_empty(thing_of(layer).kept_shape(x.shape), dtype=torch.bool)]


# In a graph the mask is one operation: it has a state, and many tiles.
define(
    "dropout_kept",
    "int layer, Tensor x",
    lambda layer, x: [thing_of(layer).kept(x)],
    _fake_kept,
)


class DistributedDropout(_DistributedDropout):
    """Sets each cell of a tensor cut over ``P_x`` to zero with probability ``p``, while training.

    What is kept is divided by ``1 - p``. Which cells are dropped depends on ``seed``, the number of
    the call and the cell's index in the global tensor: it is the same under every partition. Both
    numbers are buffers, so that a run resumed from a state dict goes on alike; without ``seed`` the
    first call takes it from torch's generator on the first worker. A call that
    ``torch.utils.checkpoint`` repeats drops the same cells again, known by a number that every call
    draws from torch's generator on the CPU. Not training, and on workers outside ``P_x``, a clone.

    Args:
        P_x: owns input and output, one axis per dim of the tensor; blocks may be uneven or empty.
        p: the probability.
        inplace: not supported.
        seed: the same on all workers, at least 0; give each layer another one.
        generator: ``"index"`` as above; ``"torch"`` draws what torch's layer draws for the whole
            tensor on a CPU under the same ``torch.manual_seed`` on all workers, bit by bit.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.

    Cost:
        No communication after the first call. About 25 operations on 8 bytes per cell; with
        ``generator="torch"`` every worker draws the whole tensor.

    Raises:
        ShapeError: ``p`` is no probability, or an argument is not supported.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        p: float = 0.5,
        inplace: bool = False,
        *,
        seed: int | None = None,
        generator: Generator = "index",
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        dims = self._count_leading_dims(P_x)
        super().__init__(P_x, p, inplace, seed, generator, global_shape, shape, dims)

    @classmethod
    def _count_leading_dims(cls, P_x: CartesianPartition) -> int:
        return P_x.dim


class _DistributedChannelDropout(DistributedDropout):
    _dims: int
    _without_batch = True

    @classmethod
    def _count_leading_dims(cls, P_x: CartesianPartition) -> int:
        if P_x.dim == cls._dims + 2 or (P_x.dim == cls._dims + 1 and cls._without_batch):
            return P_x.dim - cls._dims
        batch = "with or without one for the batch" if cls._without_batch else "and the batch"
        raise PartitionError(
            f"{cls.__name__}: P_x has shape {list(P_x.shape)} but needs axes for channels and "
            f"{cls._dims} of features, {batch} in front"
        )


class DistributedDropout1d(_DistributedChannelDropout):
    """Drops whole channels of ``[B, C, L]`` or ``[C, L]``; else as :class:`DistributedDropout`.

    Raises:
        PartitionError: ``P_x`` has another number of axes.
    """

    _dims = 1


class DistributedDropout2d(_DistributedChannelDropout):
    """Drops whole channels of ``[B, C, H, W]``; else as :class:`DistributedDropout`.

    Raises:
        PartitionError: ``P_x`` has another number of axes. Torch takes images without a batch for
            ``[B, C, L]``: use :class:`DistributedDropout1d` for those.
    """

    _dims = 2
    _without_batch = False


class DistributedDropout3d(_DistributedChannelDropout):
    """Drops whole channels of ``[B, C, D, H, W]`` or ``[C, D, H, W]``.

    Else as :class:`DistributedDropout`.

    Raises:
        PartitionError: ``P_x`` has another number of axes.
    """

    _dims = 3


class DistributedAlphaDropout(DistributedDropout):
    """Sets cells to SELU's lower limit, and keeps mean 0 and variance 1.

    Else as :class:`DistributedDropout`.
    """

    def _dropped(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        scale = 1 / sqrt((_ALPHA * _ALPHA * self.p + 1) * (1 - self.p))
        noise = kept.to(x.dtype)
        # In the order in which torch rounds.
        shift = noise.add(-1).mul_(_ALPHA * scale).add_(_ALPHA * scale * self.p)
        return x * noise.mul_(scale) + shift


class DistributedFeatureAlphaDropout(DistributedAlphaDropout):
    """Alpha dropout of whole channels of ``[B, C, ...]``; else as :class:`DistributedDropout`.

    Raises:
        PartitionError: ``P_x`` has fewer than 2 axes.
    """

    @classmethod
    def _count_leading_dims(cls, P_x: CartesianPartition) -> int:
        if P_x.dim < 2:
            raise PartitionError(
                f"{cls.__name__}: P_x has shape {list(P_x.shape)} but needs axes for the batch and "
                "the channels"
            )
        return 2
