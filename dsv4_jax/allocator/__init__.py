"""What the host knows of a cache: who holds which slot and block, and whether it is sound.

    manager            a request's slot and blocks: admit, extend, fork, share, release
    block_pool         how often each block is held, which are free, what gives way
    prefix_tree        full blocks by their tokens, and where requests can be resumed
    host_tier          what the tree let go, in pages of the host's memory
    prefix_cache       what admitted requests have in common with the tree
    pending_changes    what the device has not been told yet
    data_shards        a manager for each data shard of a mesh
    pool_plan          how many slots, blocks and snapshots there are
    verify             reads a whole cache, against the `ledger` of who holds what

docs/design/architecture.md has a table of who holds a block from a request's submission to its end.
"""

from dsv4_jax.allocator.ledger import Ledger
from dsv4_jax.allocator.manager import KVCacheManager
from dsv4_jax.allocator.pool_plan import PoolPlan, plan_pools
from dsv4_jax.allocator.problem import Problem
from dsv4_jax.allocator.seals import Seals
from dsv4_jax.allocator.verify import Report, verify_cache

__all__ = [
    "KVCacheManager",
    "Ledger",
    "PoolPlan",
    "Problem",
    "Report",
    "Seals",
    "plan_pools",
    "verify_cache",
]
