"""Assignment of attention heads to workers: blocks of query heads, with the key heads they use."""

from __future__ import annotations

from dataclasses import dataclass

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks


@dataclass(frozen=True)
class HeadCut:
    """Split of query heads, and of key and value heads, over ``size`` workers in a line.

    Attributes:
        group: number of query heads that share a key head.
        queries: number of query heads of each worker; may be 0.
        keys: number of key heads of each block.
        blocks: number of blocks of key heads; each is held by ``size / blocks`` consecutive
            workers.
    """

    size: int
    group: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def of(cls, name: str, num_heads: int, num_kv_heads: int, size: int) -> HeadCut:
        """Return the split with the fewest query heads on any worker, and then the most key blocks.

        Raises:
            ShapeError: the number of query heads is not a multiple of the number of key heads.
        """
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ShapeError(
                f"{name}: num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}"
            )
        group = num_heads // num_kv_heads
        cuts: list[HeadCut] = []
        for blocks in range(min(size, num_kv_heads), 0, -1):
            if size % blocks == 0:
                keys = Blocks(num_kv_heads, blocks).lengths
                queries = [Blocks(n * group, size // blocks).lengths for n in keys]
                cuts.append(cls(size, group, tuple(sum(queries, ())), keys))
        return min(cuts, key=lambda cut: max(cut.queries))

    @property
    def blocks(self) -> int:
        return len(self.keys)

    def first_query(self, rank: int) -> int:
        """Return the global index of a worker's first query head."""
        return sum(self.queries[:rank])

    def used_keys(self, rank: int) -> tuple[int, int]:
        """Return the range of key heads, within a worker's block, that its query heads use."""
        first, count = self.first_query(rank), self.queries[rank]
        held = sum(self.keys[: rank // (self.size // self.blocks)])
        if count == 0:
            return 0, 0
        return first // self.group - held, (first + count - 1) // self.group + 1 - held

    def key_of_queries(self, rank: int) -> list[int]:
        """Return the key head of each query head of a worker, counted among the used key heads."""
        first = self.first_query(rank)
        heads = range(first, first + self.queries[rank])
        return [head // self.group - first // self.group for head in heads]
