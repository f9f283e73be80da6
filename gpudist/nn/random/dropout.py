"""Distributed dropout: the same cells are dropped under every partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange.torch_library import define, handles_of, thing_of
from gpudist.exchange.tracing import is_recorded
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.partitions import require_axes
from gpudist.nn.random.call_numbers import CallNumbers
from gpudist.nn.random.cells import Cells, Key, draw_kept
from gpudist.nn.random.composed_cells import draw_kept_by_torch
from gpudist.nn.random.drop import drop_by_index, drop_cells
from gpudist.ops.operator import own_index
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition

Generator = Literal["index", "torch"]

_NO_SEED = -1


@layer(F.dropout, Sample((2, 4, 9, 8)), p=0.4, generator="torch")
class DistributedDropout(DistributedModule):
    """Set each cell of a tensor split over ``P_x`` to zero with probability ``p``, while training.

    Kept cells are divided by ``1 - p``. Which cells are dropped depends on ``seed``, the number of
    the call and the cell's index in the global tensor, so it is the same for every partition. Seed
    and call number are buffers, so that a run resumed from a state dict continues identically.
    Without ``seed``, the first call draws the seed from torch's generator on the first worker. A
    call repeated by ``torch.utils.checkpoint`` drops the same cells again; it is recognized by a
    number that every call draws from torch's generator on the CPU. In evaluation, and on workers
    outside ``P_x``, the layer returns a clone.

    Args:
        P_x: partition of input and output, one axis per dim of the tensor; blocks may be uneven or
            empty.
        p: probability of dropping a cell.
        inplace: not supported.
        seed: seed of at least 0, the same on all workers; use a different one for each layer.
        generator: ``"index"`` as above; ``"torch"`` draws, bitwise, what torch's layer draws for
            the whole tensor on a CPU, given the same ``torch.manual_seed`` on all workers.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.

    Cost:
        No communication after the first call. One pass over the block in forward, and one in
        backward, which draws again. With ``generator="torch"``, every worker draws the whole
        tensor.

    Raises:
        ShapeError: ``p`` is not a probability, or an argument is not supported.
    """

    seed: torch.Tensor | None
    calls: torch.Tensor | None
    _is_alpha = False
    # Buffers that the state dict of the sequential layer does not have.
    beyond_sequential = ("seed", "calls")
    _shown = ("generator",)

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
        super().__init__()
        self._require(P_x, p, inplace, seed, generator)
        self.P_x, self.p, self.generator = P_x, p, generator
        self.inplace = inplace
        self._leading_dims = self._count_leading_dims(P_x)
        by_index = generator == "index"
        first = _NO_SEED if seed is None else seed
        self.register_buffer("seed", torch.tensor(first) if by_index else None)
        self.register_buffer("calls", torch.tensor(0) if by_index else None)
        self._numbers = CallNumbers()
        self._seed_agreed = seed is not None
        self._agree_on(P_x, P_x.dim, global_shape, shape)

    def _require(
        self,
        P_x: CartesianPartition,
        p: float,
        inplace: bool,
        seed: int | None,
        generator: Generator,
    ) -> None:
        if not 0 <= p <= 1:
            raise ShapeError(f"{self._name}: p is {p}; it must be between 0 and 1")
        if inplace:
            raise ShapeError(f"{self._name}: inplace is not supported; outputs are new tensors")
        if generator not in ("index", "torch"):
            raise ShapeError(f"{self._name}: generator is {generator!r}; use 'index' or 'torch'")
        if generator == "torch" and seed is not None:
            raise ShapeError(
                f"{self._name}: generator 'torch' draws from torch's generator, which is seeded "
                "by torch.manual_seed; omit seed"
            )
        if generator == "torch" and P_x.device.type != "cpu":
            raise ShapeError(
                f"{self._name}: generator 'torch' needs a CPU, but the partition's device is "
                f"{P_x.device}; use 'index'"
            )
        if seed is not None and not 0 <= seed < 1 << 63:
            raise ShapeError(f"{self._name}: seed is {seed}; it must be between 0 and 2^63 - 1")

    def _placements(self) -> dict[str, ParameterPlacement]:
        placed = ParameterPlacement.on(self.P_x.world, ())
        return {name: placed for name, _ in self.named_buffers(recurse=False)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input.clone()
        if self.p == 1:
            return input * torch.zeros((), dtype=input.dtype, device=input.device)
        if is_recorded(input):
            (layer,) = handles_of(self)
            kept = torch.ops.gpudist.dropout_kept(layer, input, None)[0]
        elif self.P_x.active and self.seed is not None:
            return drop_by_index(input, *self._draw(input), self.p, self._is_alpha)
        else:
            kept = self._draw_mask(input)
        if not self.P_x.active:
            return input.clone()
        return drop_cells(input, kept, self.p, self._is_alpha)

    def _draw(self, x: torch.Tensor) -> tuple[Key, Cells]:
        cells, call = self._bindings(x, self._agree_and_bind), self._number()
        assert self.seed is not None and call is not None
        return Key(self.seed, call), cells

    def _draw_mask(self, x: torch.Tensor) -> torch.Tensor:
        """Return a bool mask, in the leading dims, of the cells to keep."""
        if not self.P_x.active:
            self._number()
            return x.new_empty(x.shape[: self._leading_dims], dtype=torch.bool)
        if self.seed is None:
            box, shape = self._bindings(x, self._agree_and_bind)
            return draw_kept_by_torch(box, shape, self.p)
        return draw_kept(*self._draw(x), self.p, x.device)

    def _number(self) -> torch.Tensor | None:
        # All workers count calls, so that generators and state dicts remain equal.
        return None if self.calls is None else self._numbers(self.calls, self._name)

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> Cells:
        # The global indices of this worker's cells in the leading dims.
        index, cut = own_index(self.P_x), layout.decomposition
        if not self._seed_agreed and self.seed is not None:
            self.seed.fill_(self._agree_on_seed(int(self.seed.item())))
        self._seed_agreed = True
        return Cells.leading(cut.block(index), cut.shape, self._leading_dims)

    def _agree_on_seed(self, seed: int) -> int:
        # Without a given seed, use the next number of torch's generator on the first worker.
        if seed == _NO_SEED:
            generator = torch.Generator()
            generator.set_state(torch.get_rng_state())
            seed = int(torch.randint(1 << 62, (), generator=generator).item())
        return self.P_x.broadcast_data([seed])[0]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any
    ) -> None:
        # The sequential layer has no state, so keep the current buffers.
        for name, buffer in self.named_buffers(recurse=False):
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)

    @classmethod
    def _count_leading_dims(cls, P_x: CartesianPartition) -> int:
        return P_x.dim


# In a compiled graph, drawing the mask is one operation, because it has state and many tiles.
define(
    "dropout_kept",
    "int layer, Tensor x",
    lambda layer, x: [thing_of(layer)._draw_mask(x)],
    lambda layer, x: [x.new_empty(x.shape[: thing_of(layer)._leading_dims], dtype=torch.bool)],
)


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


@layer(F.dropout1d, Sample((2, 4, 9)), p=0.4, generator="torch")
class DistributedDropout1d(_DistributedChannelDropout):
    """Drop whole channels of ``[B, C, L]`` or ``[C, L]``.

    Otherwise like :class:`DistributedDropout`.

    Args:
        P_x ... shape: see :class:`DistributedDropout`.

    Raises:
        PartitionError: ``P_x`` does not have 2 or 3 axes.
    """

    _dims = 1


@layer(F.dropout2d, Sample((2, 4, 9, 8)), p=0.4, generator="torch")
class DistributedDropout2d(_DistributedChannelDropout):
    """Drop whole channels of ``[B, C, H, W]``.

    Otherwise like :class:`DistributedDropout`.

    Args:
        P_x ... shape: see :class:`DistributedDropout`.

    Raises:
        PartitionError: ``P_x`` does not have 4 axes. Torch takes images without a batch for
            ``[B, C, L]``: use :class:`DistributedDropout1d` for those.
    """

    _dims = 2
    _without_batch = False


@layer(F.dropout3d, Sample((2, 4, 5, 6, 3)), p=0.4, generator="torch")
class DistributedDropout3d(_DistributedChannelDropout):
    """Drop whole channels of ``[B, C, D, H, W]`` or ``[C, D, H, W]``.

    Otherwise like :class:`DistributedDropout`.

    Args:
        P_x ... shape: see :class:`DistributedDropout`.

    Raises:
        PartitionError: ``P_x`` does not have 4 or 5 axes.
    """

    _dims = 3


@layer(F.alpha_dropout, Sample((2, 4, 9, 8)), p=0.4, generator="torch")
class DistributedAlphaDropout(DistributedDropout):
    """Set dropped cells to SELU's lower limit, and keep mean 0 and variance 1.

    Otherwise like :class:`DistributedDropout`.

    Args:
        P_x ... shape: see :class:`DistributedDropout`.
    """

    _is_alpha = True


@layer(F.feature_alpha_dropout, Sample((2, 4, 9, 8)), p=0.4, generator="torch")
class DistributedFeatureAlphaDropout(DistributedAlphaDropout):
    """Alpha dropout of whole channels of ``[B, C, ...]``.

    Otherwise like :class:`DistributedDropout`.

    Args:
        P_x ... shape: see :class:`DistributedDropout`.

    Raises:
        PartitionError: ``P_x`` has fewer than 2 axes.
    """

    @classmethod
    def _count_leading_dims(cls, P_x: CartesianPartition) -> int:
        require_axes(cls.__name__, P_x, P_x.dim >= 2, "axes for the batch and the channels")
        return 2
