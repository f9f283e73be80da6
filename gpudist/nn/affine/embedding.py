"""Distributed embedding: a table in blocks of rows and columns on a grid of workers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as index_value
from typing import overload

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.torch_library import handles_of
from gpudist.exchange.tracing import is_recorded
from gpudist.nn.affine.affine_layer import AffineLayer, BoundAffine
from gpudist.nn.affine.affine_placement import AffinePlacement, place_matrix
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.parameters.parameter import normal_parameter
from gpudist.nn.parameters.parameter_layer import ParameterLayer, move_those
from gpudist.nn.partitions import partitions_lead, plane, refuse_given, require_cells
from gpudist.ops.bind_cache import BindCache
from gpudist.ops.operator import own_index
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode, refuse
from gpudist.world.partition import CartesianPartition, Partition


class TableLayer(ParameterLayer):
    """Layer that looks up rows of a table, its weight."""

    num_embeddings: int
    padding_idx: int | None
    # Workers that have inputs, and wait for one another.
    _P_inputs: Partition

    def _require_indices(self, x: torch.Tensor) -> None:
        if x.dtype not in (torch.int64, torch.int32):
            raise ShapeError(f"{self._name}: indices are {x.dtype} but must be int64 or int32")
        if is_recorded(x):
            (layer,) = handles_of(self)
            torch.ops.gpudist.check(layer, x, "_check_range", [], None)
        else:
            self._check_range(x)

    def _check_range(self, x: torch.Tensor) -> None:
        """Raise for indices out of range; not checked on a GPU, where this would synchronize."""
        if x.device.type != "cpu":
            return
        wrong = x[(x < 0) | (x >= self.num_embeddings)]
        if wrong.numel():
            refuse(
                self._P_inputs,
                ShapeError(
                    f"{self._name}: index {wrong[0].item()} must be from 0 to "
                    f"{self.num_embeddings - 1}"
                ),
            )

    def _clear_padding(self, first: int) -> None:
        row = -1 if self.padding_idx is None else self.padding_idx - first
        if 0 <= row < len(self.weight):
            self.weight.data[row] = 0


def rows_of_block(
    x: torch.Tensor, weight: torch.Tensor, first: int, padding: int | None
) -> torch.Tensor:
    """Look up the indices in a block of a table; vectors of the other indices are 0.

    Args:
        x: indices of rows of the table.
        weight: block of the table.
        first: number of its first row.
        padding: row of the table without a gradient, ``None`` if every row has one.
    """
    last = first + len(weight)
    own_padding = padding - first if padding is not None and first <= padding < last else None
    elsewhere = (x < first) | (x >= last)
    rows = F.embedding((x - first).masked_fill(elsewhere, 0), weight, own_padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


@layer(F.embedding, Sample((6, 7), "classes", 11), num_embeddings=11, embedding_dim=4)
class DistributedEmbedding(AffineLayer, TableLayer):
    """Look up rows of a table ``[num_embeddings, embedding_dim]`` for a tensor of indices.

    With ``P_x`` alone, it partitions the indices in any dims, and the output
    ``[..., embedding_dim]`` in the same dims; its first worker owns the table. With
    ``P_x, P_y, P_w`` of shapes ``[*leading]``, ``[*leading, e]`` and ``[*leading, v, e]``, the
    table is cut into ``v`` balanced blocks of rows and ``e`` of columns. The indices are broadcast
    to the grid of ``P_w``, each worker looks up the rows in its block, and ``P_y`` receives the sum
    over the blocks of rows. The workers of ``P_w`` at index 0 of all leading axes own the blocks.
    If all leading axes are 1, ``P_w`` may have shape ``[v, e]``.

    All other workers hold zero-volume parameters. Initial values equal those of the torch layer
    under the same seed.

    Args:
        P_x: partition of the indices; its axes are aligned with the last dims, and the tensor may
            have more leading dims.
        P_y, P_w: partitions of the output and of the table; optional. Pass both, by name or
            directly after ``P_x``.
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in the torch layer; sizes are
            global.
        max_norm, norm_type, scale_grad_by_freq, sparse: as in the torch layer; ``max_norm`` and
            true values of the last two are not supported.
        global_shape: global shape of the indices; saves the agreement on their blocks.
        shape: ``"dynamic"`` makes the ranks agree on the blocks at every call.
        replicate_parameters: keep a copy of each parameter block on every worker that uses it.
            Forward then moves no parameters, and backward sums the gradients over the copies;
            :func:`~gpudist.nn.fuse_parameter_movements` sums those of several layers together.

    Cost:
        A broadcast of the indices and a sum-reduce of the output blocks, plus a broadcast of the
        table's blocks if there are leading axes. With ``P_x`` alone, a broadcast of the table.

    Raises:
        PartitionError: the partitions do not match.
        ShapeError: an argument is not supported, or there are more blocks than rows or columns. On
            a CPU, also if an index is out of range; other workers then raise at their next wait.
    """

    @overload
    def __init__(
        self, P_x: CartesianPartition, num_embeddings: int, embedding_dim: int,
        padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, sparse: bool = False,
        _weight: torch.Tensor | None = None, _freeze: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        P_y: CartesianPartition | None = None, P_w: CartesianPartition | None = None,
        global_shape: Sequence[int] | None = None, shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, P_x: CartesianPartition, P_y: CartesianPartition, P_w: CartesianPartition,
        num_embeddings: int, embedding_dim: int, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
        sparse: bool = False, _weight: torch.Tensor | None = None, _freeze: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        global_shape: Sequence[int] | None = None, shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @partitions_lead
    def __init__(
        self, P_x: CartesianPartition, num_embeddings: int, embedding_dim: int,
        padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, sparse: bool = False,
        _weight: torch.Tensor | None = None, _freeze: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        P_y: CartesianPartition | None = None, P_w: CartesianPartition | None = None,
        global_shape: Sequence[int] | None = None, shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_given(
            self._name, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse,
            _weight=_weight,
        )  # fmt: skip
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_row(self._name, padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.P_x = self._P_inputs = P_x
        self.P_y = P_y if P_y is not None else P_x
        self.P_w, self._placement = plane(P_x, ()), AffinePlacement.whole(P_x)
        if P_y is not None and P_w is not None:
            self.P_w, e = P_w, P_y.shape[-1]
            self._placement = place_matrix(
                self._name, P_x, P_y, P_w, P_x.shape, (None, e), (1, 1), (1, e)
            )
            rows, columns = self._placement.parts
            require_cells(self._name, 0, rows, self.num_embeddings, "embeddings")
            require_cells(self._name, 1, columns, self.embedding_dim, "dims of an embedding")
        used = self._placement.parameters((self.num_embeddings, self.embedding_dim))
        self._place(replicate_parameters, used, self._placement.P_all)
        placed = self._placed["weight"]
        self.weight = normal_parameter(placed.shape, placed.own_box, device, dtype)
        if placed.own_box is not None:
            self._clear_padding(placed.own_box.start[0])
        self.weight.requires_grad_(not _freeze)
        self._agree_on(P_x, None, global_shape, shape, self._placement.P_all)
        self._whole = BindCache[BoundAffine]("static")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._placement.P_all.active:
            return input.clone()
        if self.P_x.active:
            self._require_indices(input)
        if self._placement.P_source is None:
            bound = self._whole(self.weight, self._bind_whole, self.way_of(input))
        else:
            bound = self._bindings(input, self._agree_and_bind, self.way_of(input))
        (weight,) = self.own_parameters()
        return self.affine(bound, input, weight, None)

    def _bind_whole(self, weight: torch.Tensor, way: int) -> BoundAffine:
        return BoundAffine(None, self.bind_parameters(), None, self.embedding_dim)

    def _compute(
        self,
        bound: BoundAffine,
        x: torch.Tensor,
        block: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        placed = self._placement
        if placed.P_source is None:
            return F.embedding(block, weight, self.padding_idx)
        first, _ = self._placed["weight"].blocks[0].block(own_index(placed.P_c)[-2])
        return rows_of_block(block, weight, first, self.padding_idx)

    def _sum(self, reduction: Movement, y: torch.Tensor) -> torch.Tensor:
        # Autocast leaves embeddings in the dtype of the table.
        return move_those((reduction,), [y])[0]

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> BoundAffine:
        if layout.dims < self.P_x.dim:
            raise ShapeError(
                f"{self._name}: the indices have {layout.dims} dims but P_x of shape "
                f"{list(self.P_x.shape)} has {self.P_x.dim} axes; a block needs one dim per axis"
            )
        return self._bind_matrix(layout, x, layout.decomposition.dims, 1, self.weight.dtype)


def padding_row(name: str, padding: int | None, rows: int) -> int | None:
    """Return the row without a gradient, counted from the front; raise if it is out of range."""
    if padding is None:
        return None
    padding = index_value(padding)
    if not -rows <= padding < rows:
        raise ShapeError(f"{name}: padding_idx {padding} must be from {-rows} to {rows - 1}")
    return padding if padding >= 0 else padding + rows
