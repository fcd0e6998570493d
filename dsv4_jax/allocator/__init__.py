"""What the host knows of a cache: who holds which slot and block, and whether it is sound."""

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
