"""Distributed embedding: the table in blocks of rows and columns on a grid of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as index_value
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.library import handles_of, is_recorded
from gpudist.geometry.blocks import Decomposition
from gpudist.nn.affine.weight_grid import WeightGrid
from gpudist.nn.parameters.layer import ParameterLayer, move_those
from gpudist.nn.parameters.parameter import normal_parameter, tied_empty
from gpudist.nn.parameters.placement import Placement
from gpudist.nn.partitions import arguments_of, leading_partitions, plane, regrid, require_cells
from gpudist.ops.agreement import Agreement, ShapeMode
from gpudist.ops.bound import Bound
from gpudist.world.partition import CartesianPartition


@dataclass
class _Arguments:
    """The arguments of torch's layer, in torch's order and with torch's defaults."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False
    _weight: torch.Tensor | None = None
    _freeze: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


class TableLayer(ParameterLayer):
    """A layer that looks up rows of a table, which is its weight."""

    _name: str
    num_embeddings: int
    padding_idx: int | None

    def _refuse(self, error: ShapeError) -> NoReturn:
        """Raise here, and where the peers wait."""
        raise NotImplementedError

    def _require_indices(self, x: torch.Tensor) -> None:
        if x.dtype not in (torch.int64, torch.int32):
            raise ShapeError(f"{self._name}: indices are {x.dtype} but must be int64 or int32")
        if is_recorded(x):
            (layer,) = handles_of(self)
            torch.ops.gpudist.check(layer, x, "_check_range", [], None)
        else:
            self._check_range(x)

    def _check_range(self, x: torch.Tensor) -> None:
        """Refuse indices that are no row. On a GPU that would wait for the host: not checked."""
        if x.device.type != "cpu":
            return
        wrong = x[(x < 0) | (x >= self.num_embeddings)]
        if wrong.numel():
            self._refuse(
                ShapeError(
                    f"{self._name}: index {wrong[0].item()} is none of the embeddings 0 to "
                    f"{self.num_embeddings - 1}"
                )
            )

    def _clear_padding(self, first: int) -> None:
        """Set the row that has no gradient to zero, in a block of rows from ``first`` on."""
        row = -1 if self.padding_idx is None else self.padding_idx - first
        if 0 <= row < len(self.weight):
            self.weight.data[row] = 0

    def _rows(self, x: torch.Tensor, weight: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """The rows of a block of the table, ``first`` to ``last``, and zeros for other rows."""
        padding = None
        if self.padding_idx is not None and first <= self.padding_idx < last:
            padding = self.padding_idx - first
        elsewhere = (x < first) | (x >= last)
        rows = F.embedding((x - first).masked_fill(elsewhere, 0), weight, padding)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


class DistributedEmbedding(TableLayer):
    """Rows of a table ``[num_embeddings, embedding_dim]``, looked up for a tensor of indices.

    With ``P_x`` alone, indices of any dims are split over it, and so is the output
    ``[..., embedding_dim]`` in those dims; the first worker owns the table. With ``P_x, P_y, P_w``
    of shapes ``[*leading]``, ``[*leading, e]`` and ``[*leading, v, e]`` the table is cut into
    balanced blocks, ``v`` of rows and ``e`` of columns: indices are broadcast to the grid of
    ``P_w``, each worker looks up the rows it has, and the sum over the blocks of rows is the
    output, on ``P_y``. The workers of ``P_w`` at index 0 of all leading axes own the blocks.
    ``P_w`` of shape ``[v, e]`` will do where all leading axes are 1.

    Other workers hold zero-volume parameters. Initial values are those of the torch layer under the
    same seed.

    Args:
        P_x: owns the indices; its axes count from the last dim, there may be more leading dims.
        P_y, P_w: own the output, and the table; optional.
        num_embeddings, embedding_dim, padding_idx, device, dtype: as torch's layer, global sizes.
        max_norm, scale_grad_by_freq, sparse: not supported.
        global_shape: of the indices, to save agreeing on their blocks.
        shape: ``"dynamic"`` agrees on the blocks at every call.
        replicate_parameters: every worker that uses a block of the parameters holds it. None moves
            in forward; in backward the gradients are summed over who holds the same cells, those of
            several layers together with :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        A broadcast of the indices and a sum-reduce of the output's blocks; where there are leading
        axes a broadcast of the table's blocks, with ``P_x`` alone of the table.

    Raises:
        PartitionError: the partitions do not fit each other.
        ShapeError: an argument is not supported, or there are more blocks than rows or columns. On
            a CPU, if an index is none of the table's: other workers raise it where they wait next.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        *arguments: Any,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._name = name = type(self).__name__
        P_y, P_w, rest = leading_partitions(name, arguments, options)
        given = arguments_of(name, _Arguments, rest, options)
        self.num_embeddings, self.embedding_dim = given.num_embeddings, given.embedding_dim
        self.padding_idx = _require(name, given)
        self.max_norm, self.norm_type = given.max_norm, given.norm_type
        self.scale_grad_by_freq, self.sparse = given.scale_grad_by_freq, given.sparse
        self.P_x, self.P_y = P_x, P_y if P_y is not None else P_x
        self._grid: WeightGrid | None = None
        self.P_w, self._P_all = plane(P_x, ()), P_x
        P_weight, parts = self.P_w, (1, 1)
        if P_y is not None and P_w is not None:
            e = P_y.shape[-1]
            self._grid = WeightGrid.place(name, P_x, P_y, P_w, P_x.shape, (None, e), (1, 1), (1, e))
            self.P_w, self._P_all = P_w, self._grid.P_all
            P_weight, parts = self._grid.P_weight, self._grid.parts
            require_cells(name, 0, parts[0], self.num_embeddings, "embeddings")
            require_cells(name, 1, parts[1], self.embedding_dim, "dims of an embedding")
        if replicate_parameters:
            P_weight = self._grid.P_c if self._grid is not None else regrid(P_x, (P_x.size, 1, 1))
        self._P_weight = P_weight
        self._cut = Decomposition.balanced((self.num_embeddings, self.embedding_dim), parts)
        index = P_weight.index
        box = None
        if index is not None:
            box = self._cut.block(index[-2:] if self._grid is not None else (0, 0))
        self.weight = normal_parameter(self._cut.shape, box, given.device, given.dtype)
        if box is not None:
            self._clear_padding(box.start[0])
        self.weight.requires_grad_(not given._freeze)
        users = {"weight": self._grid.P_c if self._grid is not None else P_x}
        self._place(replicate_parameters, self._placements(), users, self._P_all)
        self._agreement = Agreement(name, P_x, self._P_all, None, global_shape, shape)
        self._bound = Bound[tuple[Movement | None, ...]](
            shape if self._grid is not None else "static", self._agreement
        )

    def _placements(self) -> dict[str, Placement]:
        P_weight = self._P_weight
        # The one owner of a whole table is alone on a grid of any number of axes.
        axes = max(0, P_weight.dim - 2), P_weight.dim - 1
        return {"weight": Placement(P_weight, self._cut, axes)}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._P_all.active:
            return input.clone()
        if self.P_x.active:
            self._require_indices(input)
        if self._grid is None:
            movements = self._bound(self.weight, self._bind_whole, self.uses_copies)
            (weight,) = move_those(movements, self.own_parameters())
            return F.embedding(input, weight, self.padding_idx)
        return self._forward_split(input, self._grid)

    def _bind_whole(self, weight: torch.Tensor, uses_copies: int) -> tuple[Movement | None, ...]:
        return self.bind_parameters()

    def _forward_split(self, x: torch.Tensor, grid: WeightGrid) -> torch.Tensor:
        spread, reduction, parameter = self._bound(x, self._agree_and_bind, self.uses_copies)
        block, weight = move_those((spread, parameter), [x, *self.own_parameters()])
        if grid.P_c.active:
            y = self._look_up(block, weight, grid)
        else:
            y = tied_empty(block.shape, weight.dtype, block, weight)
        return move_those((reduction,), [y])[0]

    def _look_up(self, x: torch.Tensor, weight: torch.Tensor, grid: WeightGrid) -> torch.Tensor:
        """The rows that this worker has, and zeros for those of others."""
        index = grid.P_c.index
        assert index is not None
        return self._rows(x, weight, *self._cut.dims[0].block(index[-2]))

    def _agree_and_bind(self, x: torch.Tensor, uses_copies: int) -> tuple[Movement | None, ...]:
        grid, layout = self._grid, self._agreement(x)
        assert grid is not None
        if layout.dims < self.P_x.dim:
            raise ShapeError(
                f"{self._name}: the indices have {layout.dims} dims but P_x of shape "
                f"{list(self.P_x.shape)} has {self.P_x.dim} axes"
            )
        spread = grid.bind_spread(layout, x)
        leading, features = layout.decomposition.dims, self._cut.dims[1]
        dtype = self.weight.dtype
        reduction = grid.bind_sum(leading, features, dtype, spread.output_shape, dtype, x)
        return spread, reduction, *self.bind_parameters()

    def _refuse(self, error: ShapeError) -> NoReturn:
        self._agreement.refuse(error)


def _require(name: str, given: _Arguments) -> int | None:
    """The row that has no gradient, counted from the front; refuses what is not supported."""
    for argument in ("max_norm", "scale_grad_by_freq", "sparse", "_weight"):
        value = getattr(given, argument)
        if value is not None and value is not False:
            raise ShapeError(f"{name}: {argument} is not supported")
    return padding_row(name, given.padding_idx, given.num_embeddings)


def padding_row(name: str, padding: int | None, rows: int) -> int | None:
    """The row that has no gradient, counted from the front; refuses one that is none."""
    if padding is None:
        return None
    padding = index_value(padding)
    if not -rows <= padding < rows:
        raise ShapeError(
            f"{name}: padding_idx {padding} is none of the embeddings {-rows} to {rows - 1}"
        )
    return padding if padding >= 0 else padding + rows
