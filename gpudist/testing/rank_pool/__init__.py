"""Pool of processes that serve as the ranks of many small worlds, one after another."""

from gpudist.testing.rank_pool.outcome import Outcome, RanksFailed
from gpudist.testing.rank_pool.pool import GRACE_S, RankPool, StartMethod

__all__ = ["GRACE_S", "Outcome", "RankPool", "RanksFailed", "StartMethod"]
