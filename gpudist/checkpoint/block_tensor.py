"""A block of a tensor as torch's distributed checkpoints write and read it."""

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
from gpudist.nn.parameters.placement import Placement


class BlockTensor(torch.Tensor):
    """The shape of a whole tensor, and this rank's block of it.

    It has no arithmetic: it is there to be a value of a state dict that
    ``torch.distributed.checkpoint`` saves or loads. Of ranks that hold the same cells one writes
    them; all read theirs.

    Args:
        block: this rank's; filled in place when loaded.
        placement: of the tensor.

    Attributes:
        block: this rank's.
    """

    block: torch.Tensor
    _box: Box | None
    _writes: bool

    @staticmethod
    def __new__(cls, block: torch.Tensor, placement: Placement) -> BlockTensor:
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
            f"{func} of a block in a state dict; save or load it with torch.distributed.checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"BlockTensor(shape={list(self.shape)}, box={self._box})"

    @property
    def _chunk(self) -> ChunkStorageMetadata | None:
        """Where the block lies; ``None`` if it has no cells."""
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
