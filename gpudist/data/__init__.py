"""Data loading in which every worker reads only its own blocks of its own samples.

The sampler partitions batches along axis 0. Samples have no batch dim, and are partitioned along
the other axes.
"""

from gpudist.data.blocks import BlockDataset, block_of
from gpudist.data.crops import RandomCrops
from gpudist.data.sampler import BlockSampler
from gpudist.data.samples import ReadsRegions

__all__ = ["BlockDataset", "BlockSampler", "RandomCrops", "ReadsRegions", "block_of"]
