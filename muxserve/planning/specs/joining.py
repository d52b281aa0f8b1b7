"""A model that joins a unit which runs already: which of its pools it shares, and everybody's part from then on.

What models are to requests stays: blocks, lengths, the size of pools and page tables. On CPU threads are divided anew.
On GPUs an engine keeps the share of SMs with which its process was started, unless leases bring shares; the new model's
engines get what is free, and where that is less than planned for them, they wait until as much is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from muxserve.cluster.units import PlannedUnit
from muxserve.config import AUTO, Fleet, FleetError, Model
from muxserve.config.adapters import AdapterError
from muxserve.control.changes import NoRoomError
from muxserve.costs.latency import LatencyModel
from muxserve.costs.profile import EngineProfile
from muxserve.gpu.budget import Needs
from muxserve.gpu.nvml import GpuMachine
from muxserve.gpu.unit import GpuPlan, GpuUnit, SmShares
from muxserve.planning.demand.checkpoints import CheckpointError, Hub, architecture_of
from muxserve.planning.demand.demands import batch_of, default_batch, with_adapters
from muxserve.planning.specs.gpus import gpu_unit
from muxserve.planning.specs.unit_demands import model_demands
from muxserve.planning.specs.unit_models import like, on_gpus
from muxserve.planning.specs.unit_plan import ResolvedUnit, resolve_unit, with_batch
from muxserve.planning.specs.unit_specs import predicted_costs, unit_spec_of
from muxserve.spec import ModelSpec, PoolSpec, UnitSpec
from placement import HostMemory, Machine, ModelDemand, PlanError, plan_unit
from placement.format import enumerate_words, format_size
from placement.pools import BLOCK_STEP, KVShape, block_in

_LEAST_SHARE = 0.01


class JoinedModel(NamedTuple):
    """A unit with a model more. `unit_spec` is the running one's from now on, `planned` what is started when it has to
    be started again, `needs` what the model is thought to take of each of its GPUs."""

    unit_spec: UnitSpec
    planned: PlannedUnit
    needs: tuple[Needs, ...] = ()


@dataclass(frozen=True)
class Joining:
    """The `model` of `fleet` that is to join the unit that was started as `planned` and is now as `unit` says.

    Args:
        fleet: as declared, with the model.
        others: units that take memory of the same machine.
        machine: that of the unit, before anything was started.
        latency: what steps are predicted to cost.
        before: the version of the model that serves now and goes afterwards; empty: none. Until then both have its
            threads or shares, so that nothing of the others changes.
    """

    fleet: Fleet
    model: str
    planned: PlannedUnit
    unit: UnitSpec
    others: Sequence[UnitSpec]
    machine: Machine
    hub: Hub
    latency: LatencyModel
    before: str = ""

    def on_cpu(self) -> JoinedModel:
        """The unit with the model, of which all else is on a CPU, too.

        Raises:
            NoRoomError: no pool of the unit suits it, or pool or memory have no room.
        """
        here = self._here
        threads = max(1, self.unit.cores // (2 + len(here.keys() - {self.before})) // self.unit.ranks)
        spare = threads if self.fleet.policy != "fcfs" else AUTO
        for pool, block in self._pools(self._demand(None)):
            mates = [each for each in here.values() if each.pool == pool.name and not each.private]
            models = [like(self.fleet.model(each.name), each) for each in mates] + [self.fleet.model(self.model)]
            models = [each.model_copy(update={"threads": spare}) if each.threads == AUTO else each for each in models]
            fleet = self.fleet.with_models(models).with_pool_size(pool.num_pages * pool.page_bytes)
            elsewhere = msgspec.structs.replace(
                self.unit,
                models=[each for each in here.values() if each not in mates],
                pools=[each for each in self.unit.pools if each is not pool],
            )
            machine = remaining_capacity(self.machine, self.fleet, [*self.others, elsewhere], self.hub)
            blocks = {self.model: block, **{each.name: each.block_tokens for each in mates}}
            try:
                plan = resolve_unit(fleet, machine, self.hub, block_tokens=blocks)
            except FleetError as error:
                raise self._no_room("; ".join(problem.message for problem in error.problems)) from None
            if [each.page_bytes for each in plan.unit.pools] == [pool.page_bytes]:
                unit = unit_spec_of(replace(plan, name=self.unit.unit), self.unit.run_dir)
                made = unit.models
                if any(each.zeroed for each in made) and not all(each.zeroed for each in mates):
                    raise self._no_room(
                        "engines there do not zero their pages, in which it would leave states of another type. "
                        f"{self._instead}"
                    )
                models_now = [msgspec.structs.replace(each, pool=pool.name) for each in made]
                return self._joined(models_now, predicted_costs(plan, unit, self.latency))
        raise self._unsuited()

    def on_gpu(self, found: GpuMachine) -> JoinedModel:
        """The unit with the model, on the GPUs that the unit has, of which `found` are all that there are. Whether it
        fits there is looked at where they are.

        Raises:
            NoRoomError: no pool of the unit suits it or has room for it, or MPS takes no more processes.
        """
        plan = self.planned.gpu
        assert plan is not None, "a unit on GPUs has a plan for them"
        here, name = self._here, self.model
        models = [like(self.fleet.model(each.name), each) for each in here.values()] + [self.fleet.model(name)]
        try:
            fleet = on_gpus(self.fleet.with_models(models), plan.unit.gpus)
            wished = gpu_unit(fleet.with_policy(self.unit.policy), found, self.hub)
        except FleetError as error:
            raise self._no_room("; ".join(problem.message for problem in error.problems)) from None
        # One that sleeps may be among either.
        needs = tuple({each.rank: each for each in (*wished.sleeping, *wished.needs) if each.model == name}.values())
        shares = self._shares(wished.shares)
        demand = self._demand(wished)
        gpu = plan.with_model(demand, needs, shares)
        settled = replace(gpu.unit, sharing=self.unit.gpu.sm_sharing if self.unit.gpu is not None else "off")
        if words := settled.too_many_clients():
            raise self._no_room(f"{words}; serve fewer models in a unit, or set `cluster.mps: off`")
        demands = {each.name: each for each in gpu.demands}
        for pool, block in self._pools(demand):
            mates = [each for each in here.values() if each.pool == pool.name and not each.private]
            members = [
                *(replace(demands[m.name], block_tokens=m.block_tokens, max_len=m.max_len) for m in mates),
                replace(demand, block_tokens=block),
            ]
            try:
                size, together = pool.num_pages * pool.page_bytes, gpu.unit.together(gpu.demands)
                unit = plan_unit(members, plan.machine, plan.cores, size, together=together)
            except PlanError as error:
                raise self._no_room("; ".join(problem.message for problem in error.problems)) from None
            if [each.page_bytes for each in unit.pools] != [pool.page_bytes]:
                continue
            fleet = self.fleet.with_models([self._batched(each.name, wished) for each in members])
            resolved = ResolvedUnit(fleet, unit, tuple(members), plan.machine, replace(settled, shares=shares))
            unit_spec = unit_spec_of(resolved, self.unit.run_dir)
            made = {each.name: each for each in unit_spec.models}
            models_now = [*(_with_pages(mate, made[mate.name]) for mate in mates), made[name]]
            models_now = [msgspec.structs.replace(each, pool=pool.name) for each in models_now]
            others = [each for each in here.values() if each not in mates]
            if self.unit.share_steps:
                models_now, others = (
                    [
                        msgspec.structs.replace(
                            each, prefill_share=shares[each.name].prefill, decode_share=shares[each.name].decode
                        )
                        for each in group
                    ]
                    for group in (models_now, others)
                )
            costs = predicted_costs(resolved, unit_spec, self.latency)
            return self._joined([*models_now, *others], costs, gpu, needs)
        raise self._unsuited()

    # ------------------------------------------------------------ details

    @property
    def _here(self) -> dict[str, ModelSpec]:
        """The models that it joins. Where the fleet has a model no longer, the unit keeps only its page table."""
        declared = {each.name for each in self.fleet.models} - {self.model}
        return {each.name: each for each in self.unit.models if each.name in declared}

    def _demand(self, gpu: GpuUnit | None) -> ModelDemand:
        fleet = self.fleet.with_models([self._batched(self.model, gpu) if gpu else self.fleet.model(self.model)])
        try:
            (demand,) = model_demands(fleet, self.machine, self.hub, gpu, {})
        except FleetError as error:
            raise NoRoomError("; ".join(problem.message for problem in error.problems)) from None
        return demand

    def _batched(self, name: str, gpu: GpuUnit) -> Model:
        model = self.fleet.model(name)
        default = default_batch(self.fleet, ((each.name, each.memory_bytes) for each in gpu.gpus))
        return with_batch(model, batch_of(model, default))

    def _pools(self, demand: ModelDemand) -> Sequence[tuple[PoolSpec, int]]:
        """The pools whose pages a block of the model fills, and its tokens.

        Raises:
            NoRoomError: it has a cache of its own.
        """
        kv = demand.architecture.kv_dtype(demand.dtype)
        shape = KVShape(self.model, demand.architecture.head_dim, kv)
        if demand.private:
            why = f"it has a KV cache of its own ({demand.private}), and what is left there belongs to the pools"
            raise self._no_room(f"{why}. {self._instead}")
        found = []
        for pool in self.unit.pools:
            block = block_in(pool.page_bytes, shape) if demand.architecture.causal else BLOCK_STEP
            if block is not None:
                found.append((pool, block))
        return found

    def _shares(self, wished: Mapping[str, SmShares]) -> dict[str, SmShares]:
        """The shares of SMs of all models of a unit on GPUs from now on; `wished` would be best for them together."""
        if self.unit.share_steps:
            return dict(wished)
        had = {each.name: SmShares(each.prefill_share, each.decode_share) for each in self._here.values()}
        own, asked = wished[self.model], self.fleet.model(self.model).sm
        # One prefill runs at a time, so that all may have the same SMs; decodes run beside it and each other.
        prefill = max((share.prefill for share in had.values()), default=own.prefill)
        free = 1.0 - prefill - sum(share.decode for share in had.values())
        decode = max(free, own.decode, _LEAST_SHARE)
        if self.before in had:
            prefill, decode = had[self.before].prefill, had[self.before].decode
        return had | {
            self.model: SmShares(
                prefill if asked.prefill is None else asked.prefill, decode if asked.decode is None else asked.decode
            )
        }

    def _joined(
        self,
        made: Sequence[ModelSpec],
        costs: Mapping[str, list[EngineProfile]],
        gpu: GpuPlan | None = None,
        needs: tuple[Needs, ...] = (),
    ) -> JoinedModel:
        declared = {each.name for each in self.fleet.models} - {self.model}
        # Predictions for the other models stay: learnt factors belong to them.
        predicted = {**costs, **self.unit.costs}
        unit_spec = msgspec.structs.replace(_with_models(self.unit, made, declared), costs=predicted)
        if gpu is not None:
            unit_spec = msgspec.structs.replace(unit_spec, resting=gpu.unit.resting_room)
        left = [each for each in unit_spec.models if each.name in declared or each.name == self.model]
        begun = msgspec.structs.replace(self.planned.unit_spec, models=left, costs=predicted, resting=unit_spec.resting)
        planned = replace(self.planned, unit_spec=begun, gpu=gpu)
        return JoinedModel(unit_spec, planned, needs)

    def _no_room(self, why: str) -> NoRoomError:
        return NoRoomError(f"{self.model} cannot join {self.unit.unit}: {why}")

    def _unsuited(self) -> NoRoomError:
        have = enumerate_words([format_size(pool.page_bytes) for pool in self.unit.pools])
        why = f"its KV does not divide into pages of {have}, which that unit has"
        return self._no_room(f"{why}. {self._instead}")

    @property
    def _instead(self) -> str:
        """Where the model can be served."""
        if self.fleet.memory is not None:
            return "Where `memory` decides, such a model must be in the fleet file when the fleet starts"
        return "Without --unit it gets a unit of its own"


def _with_pages(model: ModelSpec, made: ModelSpec) -> ModelSpec:
    return msgspec.structs.replace(model, quota_pages=made.quota_pages, floor_pages=made.floor_pages)


def _with_models(unit: UnitSpec, planned: Sequence[ModelSpec], declared: Collection[str]) -> UnitSpec:
    """A unit with models that were planned anew. Its other models stay as they are, but those that are not `declared`
    any more get nothing."""
    new = {model.name: model for model in planned}
    models = []
    for model in unit.models:
        if model.name in new:
            models.append(new.pop(model.name))
        elif model.name not in declared:
            models.append(msgspec.structs.replace(model, quota_pages=0, floor_pages=0))
        else:
            models.append(model)
    return msgspec.structs.replace(unit, models=[*models, *new.values()])


def same_table(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether engines and memory manager of a unit would take one model for the other for as long as the unit runs."""
    return _table(one) == _table(other)


def _table(model: ModelSpec) -> tuple[object, ...]:
    return model.path, model.dtype, model.layers, model.kv_heads, model.head_dim, model.block_tokens, model.num_blocks


def remaining_capacity(machine: Machine, fleet: Fleet, units: Sequence[UnitSpec], hub: Hub) -> Machine:
    """The machine without what the weights, pools and private caches of `units` take; `fleet` declares their models."""
    taken = HostMemory(
        weights=sum(_weights(fleet, unit, hub) for unit in units),
        pools=sum(pool.num_pages * pool.page_bytes * unit.ranks for unit in units for pool in unit.pools),
        caches=sum(model.kv_bytes * unit.ranks for unit in units for model in unit.models),
    )
    return taken.left_of(machine)


def _weights(fleet: Fleet, unit: UnitSpec, hub: Hub) -> int:
    total = 0
    for model in unit.models:
        try:
            declared = fleet.model(model.name)
            on_gpus = unit.gpu is not None
            architecture = with_adapters(declared, architecture_of(declared, hub, on_gpus), on_gpus)
        except (KeyError, CheckpointError, AdapterError):
            continue  # removed meanwhile: its weights are gone
        if fleet.memory is None or declared.keep == "always":  # for others there is room when they are woken
            total += architecture.weight_bytes(model.dtype)
    return total
