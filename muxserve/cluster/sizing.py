"""From what the weight holders measured to page pools that fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from muxserve.cluster.plan import FleetPlan, deployment_of
from muxserve.config import FleetError
from muxserve.deployment import Deployment, save
from muxserve.gpu.budget import Budget, Needs


class SizingError(Exception):
    """The GPUs have too little memory for the unit; the message says what to change."""


class PoolSizer:
    """Plans the pools of a deployment anew when its models have been measured, and writes that down."""

    def __init__(self, plan: FleetPlan, deployment: Deployment, file: Path) -> None:
        self._plan = plan
        self._deployment = deployment
        self._file = file

    def size(self, needs: Sequence[Needs]) -> tuple[Deployment, list[Budget]]:
        """The deployment with pools of the measured size, saved where every process will read it; and the budgets.

        Raises:
            SizingError: too little is left for the pools.
        """
        try:
            plan = self._plan.measured(needs)
        except FleetError as error:
            raise SizingError("; ".join(problem.message for problem in error.problems)) from None
        planned = deployment_of(plan, self._deployment.run_dir)
        # Host and port may be the command line's; they and everything else stay as they were.
        deployment = msgspec.structs.replace(self._deployment, pools=planned.pools, models=planned.models)
        save(deployment, self._file)
        assert plan.gpu is not None
        return deployment, plan.gpu.budgets(plan.demands)
