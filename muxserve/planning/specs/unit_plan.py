"""A unit of models that fits its machine: pools, threads and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from muxserve.config import AUTO, Fleet, FleetError, Model, Problem
from muxserve.costs.architecture import ModelArchitecture
from muxserve.gpu.budget import BudgetError
from muxserve.gpu.findings import Findings
from muxserve.gpu.unit import GpuPlan, GpuUnit
from muxserve.planning.demand.checkpoints import Hub, without_chat_template
from muxserve.planning.demand.demands import Batch, batch_of, default_batch
from muxserve.planning.demand.images import about_images
from muxserve.planning.demand.private import LOST
from muxserve.planning.specs.unit_demands import estimated_in_words, known, model_demands
from muxserve.spec import PolicyName
from placement import HostMemory, Machine, ModelDemand, PlanError, PlanProblem, UnitPlan, plan_unit
from placement.format import enumerate_words, format_size

UNIT = "u0"


@dataclass(frozen=True)
class ResolvedUnit:
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
        templates = filter(None, map(without_chat_template, self.fleet.models))
        lost = [f"what a private cache does without: {LOST}"] if any(d.private for d in self.demands) else []
        how = self.gpu.describe() if self.gpu else self._on_cpu()
        pairs = zip(self.fleet.models, self.architectures, strict=True)
        images = filter(None, (about_images(model, each, self.gpu is not None) for model, each in pairs))
        return (*how, *self.unit.notes, *lost, *estimated_in_words(self.demands), *images, *templates)

    def _on_cpu(self) -> Iterator[str]:
        model, stages = self.fleet.models[0], self.demands[0].stages
        if stages > 1:
            yield f"{model.name} has one engine of both phases, its layers over {stages} processes"
        if model.rolls:
            yield f"{model.name} has one engine of both phases, and prefill rolls over its replicas"
        generating = [demand for demand in self.demands if not demand.architecture.pooling]
        if names := [demand.name for demand in generating if not demand.one_engine]:
            yield f"{enumerate_words(names)} {'has' if len(names) == 1 else 'have'} an engine for each phase"

    @property
    def policy(self) -> PolicyName:
        """By which the unit's scheduler decides."""
        if self.gpu is not None and self.gpu.one_at_a_time:
            return "fcfs"
        (model, *_) = self.fleet.models
        if model.rolls:
            return "rolling"
        # A replica that has its devices to itself shares them with nobody, so that no lease is withheld.
        alone = len(self.demands) == 1 and self.demands[0].one_engine
        return "free" if alone else self.fleet.policy

    @property
    def served(self) -> tuple[str, ...]:
        """The models that have engines from the beginning."""
        return tuple(model.name for model in self.fleet.models) if self.serves is None else self.serves

    def with_fleet(self, fleet: Fleet) -> ResolvedUnit:
        """The same plan for the same fleet with other model paths."""
        return replace(self, fleet=fleet)

    def with_paths(self, fleet: Fleet) -> ResolvedUnit:
        """The same plan with the model paths of `fleet`, which has these models and perhaps others."""
        models = [each.model_copy(update={"path": fleet.model(each.name).path}) for each in self.fleet.models]
        return replace(self, fleet=self.fleet.with_models(models))

    def with_gpu(self, gpu: GpuUnit) -> ResolvedUnit:
        """The same plan with the GPUs shared in another way."""
        return replace(self, gpu=gpu)

    def as_found(self, findings: Findings) -> ResolvedUnit:
        """The same on GPUs of which that was found, with pools of what is left there.

        Raises:
            FleetError: the fleet does not fit then.
        """
        assert self.gpu is not None
        gpu = self.gpu.as_found(findings)
        return replace(self, gpu=gpu, unit=_unit(self.fleet, self.demands, self.machine, gpu, self.units))

    def gpu_plan(self) -> GpuPlan | None:
        """What a host has to know of the GPUs; None for serving on CPU."""
        if self.gpu is None:
            return None
        cluster = self.fleet.cluster
        size = known(self.fleet.kv_pool.size)
        return GpuPlan(self.gpu, self.demands, self.machine, known(cluster.cores), size, cluster.mps)


def resolve_unit(
    fleet: Fleet,
    machine: Machine,
    hub: Hub | None = None,
    gpu: GpuUnit | None = None,
    *,
    units: int = 1,
    block_tokens: Mapping[str, int] | None = None,
) -> ResolvedUnit:
    """Read every model's architecture and plan one unit of all of them.

    Args:
        gpu: the GPUs to serve on; None: the CPU.
        units: how many units the machine's memory is for.
        block_tokens: tokens of a block of models that have replicas elsewhere.

    Raises:
        FleetError: a model cannot be served or the fleet does not fit; all reasons, with file and line.
        ValueError: a model that has a unit to itself is not the only one.
    """
    if len(fleet.models) > 1 and any(model.has_own_unit for model in fleet.models):
        raise ValueError(
            "models over several stages, and those over whose replicas prefill rolls, have units to themselves"
        )
    default = default_batch(fleet, ((each.name, each.memory_bytes) for each in (gpu.gpus if gpu else ())))
    fleet = fleet.with_models([with_batch(model, batch_of(model, default)) for model in fleet.models])
    demands = model_demands(fleet, machine, hub, gpu, block_tokens or {}, units)
    return ResolvedUnit(fleet, _unit(fleet, demands, machine, gpu, units), demands, machine, gpu, units=units)


def with_batch(model: Model, batch: Batch) -> Model:
    """The model with sizes of its steps."""
    return model.model_copy(update={"max_num_seqs": batch.seqs, "max_num_batched_tokens": batch.tokens})


def check_together(fleet: Fleet, plans: Sequence[ResolvedUnit], machine: Machine) -> None:
    """Each unit fits; together they may not."""
    if len(plans) == 1:
        return
    memory = sum((HostMemory.of(plan.unit, plan.demands) for plan in plans), HostMemory())
    count, shared = len(plans), machine.shared_memory_bytes
    key = ("kv_pool", "size") if fleet.kv_pool.size != AUTO else ("models",)
    if shared is not None and memory.pools > shared:
        message = (
            f"the pools of {count} units take {format_size(memory.pools)} together, but only {format_size(shared)} of "
            "shared memory (/dev/shm) are free; make it larger (docker run --shm-size), or the pools smaller "
            "(kv_pool.size)"
        )
        raise FleetError([fleet.problem(key, message)])
    if memory.total > machine.memory_bytes:
        message = (
            f"{count} units need {format_size(memory.weights)} for weights (every unit loads its own) and "
            f"{format_size(memory.kv)} for KV, but the memory is {format_size(machine.memory_bytes)}; "
            "have fewer replicas, or smaller pools (kv_pool.size is of one unit)"
        )
        raise FleetError([fleet.problem(key, message)])


def _unit(fleet: Fleet, demands: Sequence[ModelDemand], machine: Machine, gpu: GpuUnit | None, units: int) -> UnitPlan:
    size, cores = known(fleet.kv_pool.size), known(fleet.cluster.cores)
    try:
        if gpu is None:
            return plan_unit(demands, machine, cores, size, units=units)
        if words := gpu.too_many_clients():
            words += "; serve fewer models in a unit, or set `cluster.mps: off`"
            raise FleetError([fleet.problem(("models",), words)])
        together = gpu.together(demands)
        return plan_unit(demands, machine, cores, gpu.pool(demands, size), together=together)
    except BudgetError as error:
        raise FleetError([fleet.problem(("cluster", "gpu_memory"), str(error))]) from None
    except PlanError as error:
        raise FleetError(_problem(fleet, problem) for problem in error.problems) from None


def _problem(fleet: Fleet, problem: PlanProblem) -> Problem:
    if problem.model is None:
        return fleet.problem(tuple(problem.key.split(".")), problem.message)
    return fleet.model_problem(problem.model, problem.key, problem.message)
