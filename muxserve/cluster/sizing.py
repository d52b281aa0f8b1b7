"""From what the weight holders measured to page pools that fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from muxserve.cluster.gpu_plan import GpuPlan
from muxserve.gpu.budget import Budget, BudgetError, Needs
from muxserve.spec import PoolSpec, UnitSpec, save
from placement import PlanError, UnitPlan


class SizingError(Exception):
    """The GPUs have too little memory for the unit; the message says what to change."""


class PoolSizer:
    """Plans the pools of a unit's spec anew when its models have been measured, and writes that down."""

    def __init__(self, plan: GpuPlan, unit_spec: UnitSpec, file: Path) -> None:
        self._plan = plan
        self._unit_spec = unit_spec
        self._file = file

    def size(self, needs: Sequence[Needs]) -> tuple[UnitSpec, list[Budget]]:
        """The unit's spec with pools of the measured size, saved where every process will read it; and the budgets.

        Raises:
            SizingError: too little is left for the pools.
        """
        try:
            unit, budgets = self._plan.pools(needs)
        except BudgetError as error:
            raise SizingError(str(error)) from None
        except PlanError as error:
            raise SizingError("; ".join(problem.message for problem in error.problems)) from None
        unit_spec = resized(self._unit_spec, unit)
        save(unit_spec, self._file)
        return unit_spec, budgets


def resized(unit_spec: UnitSpec, unit: UnitPlan) -> UnitSpec:
    """The unit's spec with the pools of a plan for the same models; all else stays as it was."""
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
        for model, plan in zip(unit_spec.models, unit.models, strict=True)
    ]
    pools = [PoolSpec(pool.name, pool.page_bytes, pool.num_pages) for pool in unit.pools]
    return msgspec.structs.replace(unit_spec, pools=pools, models=models)
