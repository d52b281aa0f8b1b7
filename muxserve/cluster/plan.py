"""From a fleet file to what every process of a unit is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from muxserve.cluster.arrangement import (
    alone,
    partition_problem,
    phases_of,
    stages_of,
)
from muxserve.cluster.checkpoints import CheckpointError, Hub, HuggingFaceHub, architecture_of
from muxserve.cluster.gpu_plan import GpuPlan
from muxserve.cluster.gpu_unit import GpuUnit
from muxserve.config import AUTO, Fleet, FleetError, Model, Problem
from muxserve.costs.architecture import ModelArchitecture
from muxserve.gpu.budget import BudgetError
from placement import Machine, ModelDemand, PlanError, PlanProblem, UnitPlan, plan_unit

UNIT = "u0"


@dataclass(frozen=True)
class FleetPlan:
    """A unit that fits the machine: `fleet` has its models alone. `unit` has the planner's notes for the user; `gpu` is
    None for serving on CPU. `serves` are the models that have engines from the beginning; None: all. `units`: how
    many units the machine's memory is for."""

    fleet: Fleet
    unit: UnitPlan
    demands: tuple[ModelDemand, ...]
    machine: Machine
    gpu: GpuUnit | None = None
    name: str = UNIT
    serves: tuple[str, ...] | None = None
    units: int = 1

    @property
    def architectures(self) -> tuple[ModelArchitecture, ...]:
        """Those of the models, in their order."""
        return tuple(demand.architecture for demand in self.demands)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided for the user, in words."""
        return (*(self.gpu.describe() if self.gpu else self._on_cpu()), *self.unit.notes)

    def _on_cpu(self) -> Iterator[str]:
        model, demand = self.fleet.models[0], self.demands[0]
        if alone(model):
            split = f", its layers over {demand.stages} processes" if demand.stages > 1 else ""
            yield f"{model.name} has one engine of both phases ({phases_of(model)}){split}"

    @property
    def served(self) -> tuple[str, ...]:
        """The models that have engines from the beginning."""
        return tuple(model.name for model in self.fleet.models) if self.serves is None else self.serves

    def with_fleet(self, fleet: Fleet) -> FleetPlan:
        """The same plan for the same fleet with other model paths."""
        return replace(self, fleet=fleet)

    def with_paths(self, fleet: Fleet) -> FleetPlan:
        """The same plan with the model paths of `fleet`, which has these models and perhaps others."""
        models = [each.model_copy(update={"path": fleet.model(each.name).path}) for each in self.fleet.models]
        return replace(self, fleet=self.fleet.with_models(models))

    def with_gpu(self, gpu: GpuUnit) -> FleetPlan:
        """The same plan with the GPUs shared in another way."""
        return replace(self, gpu=gpu)

    def gpu_plan(self) -> GpuPlan | None:
        """What a host has to know of the GPUs; None for serving on CPU."""
        if self.gpu is None:
            return None
        cluster = self.fleet.cluster
        size = _known(self.fleet.kv_pool.size)
        return GpuPlan(self.gpu, self.demands, self.machine, _known(cluster.cores), size, cluster.mps)


def plan_fleet(
    fleet: Fleet,
    machine: Machine,
    hub: Hub | None = None,
    gpu: GpuUnit | None = None,
    *,
    units: int = 1,
    block_tokens: Mapping[str, int] | None = None,
) -> FleetPlan:
    """Read every model's architecture and plan one unit of all of them.

    Args:
        gpu: the GPUs to serve on; None: the CPU.
        units: how many units the machine's memory is for.
        block_tokens: tokens of a block of models that have replicas elsewhere.

    Raises:
        FleetError: a model cannot be served or the fleet does not fit; all reasons, with file and line.
        ValueError: a model that has a unit to itself is not the only one.
    """
    if len(fleet.models) > 1 and any(map(alone, fleet.models)):
        raise ValueError("rolling and pipelined models have units to themselves")
    demands = demands_of(fleet, machine, hub, gpu, block_tokens or {}, units)
    return FleetPlan(fleet, _unit(fleet, demands, machine, gpu, units), demands, machine, gpu, units=units)


def demands_of(
    fleet: Fleet,
    machine: Machine,
    hub: Hub | None,
    gpu: GpuUnit | None,
    block_tokens: Mapping[str, int],
    units: int = 1,
) -> tuple[ModelDemand, ...]:
    """What the models need of a unit; arguments and errors are those of `plan_fleet`."""
    hub = hub or HuggingFaceHub()
    problems: list[Problem] = []
    demands: list[ModelDemand] = []
    cores = _known(fleet.cluster.cores) or machine.cores
    for key in ("gpus", "nodes"):
        if getattr(fleet.cluster, key) and gpu is None:
            message = f"this works on the CPU of this machine only; leave {key} out here"
            problems.append(fleet.problem(("cluster", key), message))
    for model in fleet.models:
        try:
            architecture = architecture_of(model, hub)
        except CheckpointError as error:
            problems.append(fleet.model_problem(model.name, "path" if model.path else "hub", str(error)))
            continue
        stages, problem = stages_of(fleet, model, architecture.layers, gpu.ranks if gpu else 0)
        split = partition_problem(fleet, model, architecture.layers, stages, os.environ)
        problems += [each for each in (problem, split) if each]
        ranks = fleet.cluster.ranks * stages if gpu is None else gpu.ranks
        threads = _threads(fleet.policy, model, cores, ranks, units)
        demand = _demand(model, architecture, threads, ranks, stages, block_tokens.get(model.name))
        demands.append(demand if gpu is None else replace(demand, dtype=gpu_dtype(model, architecture)))
        if gpu is not None and demands[-1].dtype == "float32":
            message = "FlashAttention has no float32; use bfloat16 or float16 on a GPU, or leave dtype out"
            problems.append(fleet.model_problem(model.name, "dtype", message))
    if problems:
        raise FleetError(problems)
    return tuple(demands)


def _threads(policy: str, model: Model, cores: int, ranks: int, units: int) -> int | None:
    """Threads of each rank of a model's engines where they do not follow from the number of models; see docs."""
    if alone(model):
        # The only engine of its unit. Those of other units compute at the same time.
        return max(1, cores // units // ranks)
    # With temporal multiplexing an engine has the whole machine while it runs.
    return max(1, cores // ranks) if policy == "fcfs" else None


def gpu_dtype(model: Model, architecture: ModelArchitecture) -> str:
    """The type that a model is served in on a GPU; checkpoints in float32 become bfloat16 unless the file insists."""
    if model.dtype != AUTO:
        return model.dtype
    return "bfloat16" if architecture.dtype == "float32" else architecture.dtype


def _unit(fleet: Fleet, demands: Sequence[ModelDemand], machine: Machine, gpu: GpuUnit | None, units: int) -> UnitPlan:
    size, cores = _known(fleet.kv_pool.size), _known(fleet.cluster.cores)
    try:
        if gpu is None:
            return plan_unit(demands, machine, cores, size, units=units)
        return plan_unit(demands, machine, cores, gpu.pool(demands, size), "cuda")
    except BudgetError as error:
        raise FleetError([fleet.problem(("cluster", "gpu_memory"), str(error))]) from None
    except PlanError as error:
        raise FleetError(_problem(fleet, problem) for problem in error.problems) from None


def fetch(fleet: Fleet, progress: Callable[[str], None], hub: Hub | None = None) -> Fleet:
    """`fleet` with a local directory for every model; what is on the hub is downloaded into its cache.

    Raises:
        FleetError: a download failed.
    """
    hub = hub or HuggingFaceHub()
    models, problems = [], []
    for model in fleet.models:
        if model.hub is not None:
            progress(f"fetching {model.hub}")
            try:
                model = model.model_copy(update={"path": str(hub.snapshot(model.hub, model.revision))})
            except CheckpointError as error:
                problems.append(fleet.model_problem(model.name, "hub", str(error)))
        models.append(model)
    if problems:
        raise FleetError(problems)
    return fleet.model_copy(update={"models": models})


def _demand(
    model: Model,
    architecture: ModelArchitecture,
    threads: int | None,
    ranks: int,
    stages: int,
    block_tokens: int | None,
) -> ModelDemand:
    return ModelDemand(
        name=model.name,
        architecture=architecture,
        dtype=None if model.dtype == AUTO else model.dtype,
        rate=model.rate,
        max_len=_known(model.max_len),
        max_num_seqs=model.max_num_seqs,
        threads=_known(model.threads) or threads,
        ranks=ranks,
        block_tokens=block_tokens,
        stages=stages,
    )


def _problem(fleet: Fleet, problem: PlanProblem) -> Problem:
    if problem.model is None:
        return fleet.problem(tuple(problem.key.split(".")), problem.message)
    return fleet.model_problem(problem.model, problem.key, problem.message)


def _known(value: int | str) -> int | None:
    return value if isinstance(value, int) else None
