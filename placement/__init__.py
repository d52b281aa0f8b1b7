"""Decides what runs where. Pure: it reads no file, opens no socket and asks no clock.

plan = plan_unit(demands, Machine(...))             # pools, quotas and shares of one machine
"""

from placement.pools import KVShape, PoolGroup, group_pools
from placement.unit import awake_together, least_pool_bytes, plan_unit, pool_groups
from placement.unit_types import (
    HostMemory,
    Machine,
    ModelDemand,
    ModelPlan,
    PlanError,
    PlanProblem,
    PoolPlan,
    TablePlan,
    UnitPlan,
)

__all__ = [
    "HostMemory",
    "KVShape",
    "Machine",
    "ModelDemand",
    "ModelPlan",
    "PlanError",
    "PlanProblem",
    "PoolGroup",
    "PoolPlan",
    "TablePlan",
    "UnitPlan",
    "awake_together",
    "group_pools",
    "least_pool_bytes",
    "plan_unit",
    "pool_groups",
]
