"""Decides what runs where. Pure: it reads no file, opens no socket and asks no clock.

architecture = read_architecture(config)            # of a checkpoint's config.json
plan = plan_unit(demands, Machine(...))             # pools, quotas and shares of one machine
"""

from placement.architecture import ModelArchitecture, UnsupportedModelError, read_architecture
from placement.pools import KVShape, PoolGroup, group_pools
from placement.unit import Machine, ModelDemand, ModelPlan, PlanError, PlanProblem, PoolPlan, UnitPlan, plan_unit

__all__ = [
    "KVShape",
    "Machine",
    "ModelArchitecture",
    "ModelDemand",
    "ModelPlan",
    "PlanError",
    "PlanProblem",
    "PoolGroup",
    "PoolPlan",
    "UnitPlan",
    "UnsupportedModelError",
    "group_pools",
    "plan_unit",
    "read_architecture",
]
