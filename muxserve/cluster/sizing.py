"""From what the weight holders measured to page pools that fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from muxserve.cluster.gpu_plan import GpuPlan
from muxserve.deployment import Deployment, PoolDeployment, save
from muxserve.gpu.budget import Budget, BudgetError, Needs
from placement import PlanError, UnitPlan


class SizingError(Exception):
    """The GPUs have too little memory for the unit; the message says what to change."""


class PoolSizer:
    """Plans the pools of a deployment anew when its models have been measured, and writes that down."""

    def __init__(self, plan: GpuPlan, deployment: Deployment, file: Path) -> None:
        self._plan = plan
        self._deployment = deployment
        self._file = file

    def size(self, needs: Sequence[Needs]) -> tuple[Deployment, list[Budget]]:
        """The deployment with pools of the measured size, saved where every process will read it; and the budgets.

        Raises:
            SizingError: too little is left for the pools.
        """
        try:
            unit, budgets = self._plan.pools(needs)
        except BudgetError as error:
            raise SizingError(str(error)) from None
        except PlanError as error:
            raise SizingError("; ".join(problem.message for problem in error.problems)) from None
        deployment = resized(self._deployment, unit)
        save(deployment, self._file)
        return deployment, budgets


def resized(deployment: Deployment, unit: UnitPlan) -> Deployment:
    """The deployment with the pools of a plan for the same models; all else stays as it was."""
    models = [
        msgspec.structs.replace(
            model,
            pool=plan.pool,
            block_tokens=plan.block_tokens,
            num_blocks=plan.num_blocks,
            quota_pages=plan.quota_pages,
            floor_pages=plan.floor_pages,
            max_len=plan.max_len,
        )
        for model, plan in zip(deployment.models, unit.models, strict=True)
    ]
    pools = [PoolDeployment(pool.name, pool.page_bytes, pool.num_pages) for pool in unit.pools]
    return msgspec.structs.replace(deployment, pools=pools, models=models)
