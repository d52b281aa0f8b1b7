"""The GPUs of a unit: which, how they are shared, and what their memory goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from muxserve.gpu.budget import Budget, Needs, budget, check, pool_bytes
from muxserve.gpu.nvml import Gpu
from muxserve.spec import GpuSpec, PhasesName, SmSharing
from placement import ModelDemand, least_pool_bytes, pool_groups
from placement.format import format_size
from placement.memory import MemoryRules


@dataclass(frozen=True)
class SmShares:
    """Parts of each GPU's SMs that a model's engines get."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class GpuUnit:
    """One unit over `gpus`, in the order of the ranks. `needs` are estimates until they have been measured; `notes`
    says in words what was decided. `phases` is how its models are arranged, `stages` the depth of its pipeline. A unit
    that is served `elsewhere` gets GPUs like these on whatever machine it comes to."""

    gpus: tuple[Gpu, ...]
    sharing: SmSharing
    shares: Mapping[str, SmShares]
    needs: tuple[Needs, ...]
    rules: MemoryRules
    notes: tuple[str, ...] = ()
    phases: PhasesName = "multiplexed"
    stages: int = 1
    elsewhere: bool = False

    @property
    def ranks(self) -> int:
        """Processes that a model is split over: as many as GPUs."""
        return len(self.gpus)

    @property
    def deployed(self) -> GpuSpec:
        """What the processes are told. Elsewhere the unit's host adds which GPUs they are."""
        exclusive = any(gpu.compute_mode.startswith("exclusive") for gpu in self.gpus)
        uuids = [] if self.elsewhere else [gpu.uuid for gpu in self.gpus]
        return GpuSpec(uuids, self.sharing, keepers_in_mps=exclusive)

    def measured(self, needs: Sequence[Needs]) -> GpuUnit:
        """The same with what was measured of the models."""
        return replace(self, needs=tuple(needs))

    def budgets(self, demands: Sequence[ModelDemand]) -> list[Budget]:
        """What the memory of each GPU goes to."""
        page_bytes = min(group.page_bytes for group in pool_groups(demands))
        return [
            budget(
                f"GPU {gpu.index} ({gpu.name})",
                gpu.memory_bytes,
                gpu.used_bytes,
                [each for each in self.needs if each.rank == rank],
                page_bytes,
                self.rules,
            )
            for rank, gpu in enumerate(self.gpus)
        ]

    def pool(self, demands: Sequence[ModelDemand], asked: int | None) -> int:
        """Bytes of the pools on each GPU: `asked`, or all that is left.

        Raises:
            muxserve.gpu.budget.BudgetError: that is not there, or not enough for one sequence of every model.
        """
        budgets = self.budgets(demands)
        check(budgets, self.needs, asked or least_pool_bytes(demands), self.rules)
        return asked or pool_bytes(budgets)

    def describe(self) -> list[str]:
        """GPUs and shares in words."""
        gpus = f"GPU {', '.join(f'{gpu.index} ({_kind(gpu)})' for gpu in self.gpus)}"
        if self.elsewhere:
            plural = "s" * (self.ranks > 1)
            gpus = f"{self.ranks} GPU{plural} ({_kind(self.gpus[0])}) of whichever machine has them free"
        if self.phases != "multiplexed":
            per_stage = self.ranks // self.stages
            stages = f"; its layers in {self.stages} stages of {per_stage} GPU{'s' * (per_stage > 1)}"
            split = stages if self.stages > 1 else ""
            return [f"{gpus}: one engine of both phases has all SMs ({self.phases}){split}", *self.notes]
        how = {
            "mps": "engines share the SMs by percentages of MPS",
            "green_contexts": "engines have SMs of their own (green contexts under MPS)",
            "off": "engines take turns on the GPU (no MPS)",
        }
        condition = ", if MPS works there" if self.elsewhere and self.sharing != "off" else ""
        words = [f"{gpus}: {how[self.sharing]}{condition}"]
        if self.sharing != "off":
            each = ", ".join(f"{name} {s.prefill:.0%}/{s.decode:.0%}" for name, s in self.shares.items())
            words.append(f"SM shares of prefill/decode: {each}")
        return [*words, *self.notes]


def _kind(gpu: Gpu) -> str:
    return f"{gpu.name}, {format_size(gpu.memory_bytes)}"
