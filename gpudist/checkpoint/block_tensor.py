"""Block of a tensor that torch's distributed checkpoints can write and read."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from gpudist.geometry.boxes import Box
from gpudist.nn.parameters.parameter_placement import ParameterPlacement


class BlockTensor(torch.Tensor):
    """Shape of a whole tensor, and this rank's block of it.

    A block tensor has no arithmetic; it is a value of a state dict that
    ``torch.distributed.checkpoint`` saves or loads. If several ranks hold the same cells, one of
    them writes these cells, and all read them.

    Args:
        block: this rank's block; filled in place when loaded.
        placement: placement of the whole tensor.

    Attributes:
        block: this rank's block.
    """

    block: torch.Tensor
    _box: Box | None
    _writes: bool

    @staticmethod
    def __new__(cls, block: torch.Tensor, placement: ParameterPlacement) -> BlockTensor:
        self = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, placement.shape, dtype=block.dtype, device=block.device
        )
        self.block = block.detach()
        self._box = placement.own_box
        self._writes = placement.is_first_copy
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        raise NotImplementedError(
            f"{func} of a block in a state dict is not supported; save or load it with "
            "torch.distributed.checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"BlockTensor(shape={list(self.shape)}, box={self._box})"

    @property
    def _chunk(self) -> ChunkStorageMetadata | None:
        if self._box is None or self._box.volume == 0:
            return None
        return ChunkStorageMetadata(torch.Size(self._box.start), torch.Size(self._box.shape))

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        chunk = self._chunk
        if chunk is None or not self._writes:
            return []
        properties = TensorProperties.create_from_tensor(self.block)
        data = TensorWriteData(chunk, properties, self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunk = self._chunk
        return [] if chunk is None else [chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.block
