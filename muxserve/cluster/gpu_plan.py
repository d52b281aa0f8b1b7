"""What a unit's host has to know of its GPUs besides the unit's spec: by which rules their memory is divided, and what
they were planned to be. Goes as JSON to hosts on other machines, which find the GPUs themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from muxserve.cluster.gpu_unit import GpuUnit
from muxserve.gpu.budget import Budget, Needs
from muxserve.gpu.sharing import MpsWish
from placement import Machine, ModelDemand, UnitPlan, plan_unit


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of a unit, and what its pools are planned from. `machine` is the one that has them, `cores` and
    `pool_bytes` what the fleet file says (None: auto), `mps` whether it wants MPS."""

    unit: GpuUnit
    demands: tuple[ModelDemand, ...]
    machine: Machine
    cores: int | None = None
    pool_bytes: int | None = None
    mps: MpsWish = "auto"

    def on(self, unit: GpuUnit, machine: Machine) -> GpuPlan:
        """The same on the GPUs that were found."""
        return replace(self, unit=unit, machine=machine)

    def pools(self, needs: Sequence[Needs]) -> tuple[UnitPlan, list[Budget]]:
        """The unit with pools of what is left, now that the models' memory has been measured; and the budgets.

        Raises:
            muxserve.gpu.budget.BudgetError: too little is left.
            placement.PlanError: it is no plan.
        """
        gpu = self.unit.measured(needs)
        size = gpu.pool(self.demands, self.pool_bytes)
        return plan_unit(self.demands, self.machine, self.cores, size, "cuda"), gpu.budgets(self.demands)

    def to_json(self) -> bytes:
        """For another machine."""
        return msgspec.json.encode(self)


def from_json(data: bytes) -> GpuPlan:
    """What `GpuPlan.to_json` made.

    Raises:
        msgspec.ValidationError: it is none.
    """
    return msgspec.json.decode(data, type=GpuPlan)
