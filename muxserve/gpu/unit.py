"""The GPUs of a unit: which, how they are shared, what their memory goes to, and page pools of what is left of it.

`GpuPlan` is what a unit's host has to know besides the unit's spec: by which rules memory is divided, and what was
planned. It goes as JSON to hosts on other machines, which find the GPUs themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from muxserve.gpu.budget import (
    GRANULARITY,
    Budget,
    BudgetError,
    Needs,
    NotFreeError,
    at_rest,
    budget,
    check,
    check_room,
    pool_beside,
    pool_bytes,
    resting_room,
)
from muxserve.gpu.findings import Fallback, Findings
from muxserve.gpu.nvml import Gpu, GpuMachine
from muxserve.gpu.sharing import MpsWish
from muxserve.spec import GpuSpec, PoolSpec, RestingSpec, SmSharing, UnitSpec, in_chunks, save
from placement import (
    Machine,
    ModelDemand,
    PlanError,
    UnitPlan,
    awake_together,
    least_pool_bytes,
    plan_unit,
    pool_groups,
)
from placement.format import format_size
from placement.memory import MemoryRules

# An MPS server takes so many processes with a context on each GPU (NVIDIA, "Multi-Process Service", since Volta).
MOST_CLIENTS = 48
# Bytes of a page that nobody takes.
LEAST_PAGE = 1 << 12
# Least part of a GPU's usable memory that the pools have where models come and go in the remainder.
LEAST_POOL_PART = 0.05


@dataclass(frozen=True)
class SmShares:
    """Parts of each GPU's SMs that a model's engines get."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class GpuUnit:
    """One unit over `gpus`, in the order of the ranks. `needs` are estimates until they have been measured; `notes`
    says in words what was decided. Models named in `one_engine` have one of both phases; the only model of a unit may
    have that over `stages`. A unit that is served `elsewhere` gets GPUs like these on whatever machine it comes to.
    `fallbacks` are what is done instead of what probes found not to work there, `full_graphs` whether they
    found CUDA graphs with attention to. With green contexts an engine
    has graphs for each of `green_sets` sets of SMs. `named`: the fleet file says how SMs are shared, or there is
    nothing to share. Where memory decides which models are awake, `sleeping` has estimates of those that sleep until
    somebody asks for them, and `needs` only the others and the largest of these; `resting_room`, which `rules` reserve,
    is for engines that stay while their models sleep."""

    gpus: tuple[Gpu, ...]
    sharing: SmSharing
    shares: Mapping[str, SmShares]
    needs: tuple[Needs, ...]
    rules: MemoryRules
    notes: tuple[str, ...] = ()
    one_engine: tuple[str, ...] = ()
    stages: int = 1
    elsewhere: bool = False
    fallbacks: tuple[Fallback, ...] = ()
    full_graphs: bool | None = None
    green_sets: int = 1
    named: bool = True
    sleeping: tuple[Needs, ...] = ()
    resting_room: RestingSpec | None = None

    @property
    def ranks(self) -> int:
        """Processes that a model is split over: as many as GPUs."""
        return len(self.gpus)

    @property
    def deployed(self) -> GpuSpec:
        """What the processes are told. Elsewhere the unit's host adds which GPUs they are."""
        uuids = [] if self.elsewhere else [gpu.uuid for gpu in self.gpus]
        return GpuSpec(
            uuids,
            self.sharing,
            ipc="legacy" if "ipc_legacy" in self.fallbacks else "auto",
            keepers_in_mps=self._keepers_in_mps,
            nvls="nvls_off" not in self.fallbacks,
            full_graphs=self.full_graphs,
            restart_mps="restart_mps" in self.fallbacks,
        )

    def as_found(self, findings: Findings) -> GpuUnit:
        """The same on GPUs of which that was found; whether MPS works is not looked at here."""
        fallbacks = findings.fallbacks
        sharing = self._sharing_as_found(findings)
        sets = self.green_sets if sharing == "green_contexts" else 1
        return replace(
            self,
            sharing=sharing,
            rules=self.rules if sharing == self.sharing else replace(self.rules, graph_sets=sets),
            fallbacks=tuple(sorted(fallbacks)),
            # A pool that is allocated anew would have another address than the graphs know.
            full_graphs=None if "ipc_legacy" in fallbacks and findings.full_graphs else findings.full_graphs,
        )

    def _sharing_as_found(self, findings: Findings) -> SmSharing:
        """The way that the fleet file names unless it was found not to work, then the other one, then turns. Where none
        is named, green contexts if they were found to work: percentages are for who asks for them."""
        if self.sharing == "off":
            return "off"
        # NCCL would leave the green contexts of several ranks.
        green = findings.green_contexts if self.ranks == self.stages else False
        # What no percentage limits needs MPS only.
        percentages = findings.percentages if self.has_percentages else "mps_off" not in findings.fallbacks
        works: dict[SmSharing, bool | None] = {"green_contexts": green, "mps": percentages}
        ways: list[SmSharing] = ["green_contexts"]
        if not self.has_percentages:
            ways = ["mps"]
        elif self.named:
            ways = sorted(works, key=lambda way: way != self.sharing)
        for way in ways:
            if works[way] or (works[way] is None and self.named and way == self.sharing):
                return way
        return "off"

    @property
    def has_percentages(self) -> bool:
        """Whether engines that share the SMs by MPS have a part of them only. None has under the policy `free` with one
        engine per model."""
        return any(share.prefill < 1.0 or share.decode < 1.0 for share in self.shares.values())

    def without_percentages(self, findings: Findings | None) -> GpuUnit:
        """The same where percentages compute wrongly: with green contexts if they were found to work, else in turns."""
        green = findings is not None and findings.green_contexts and self.ranks == self.stages
        sharing: SmSharing = "green_contexts" if green else "off"
        return replace(self, sharing=sharing, rules=replace(self.rules, graph_sets=self.green_sets if green else 1))

    @property
    def _memory_rules(self) -> MemoryRules:
        """Where memory cannot be exported, who holds a model's weights has a context, too."""
        holder = 0 if self.deployed.exports_weights else 1
        return replace(self.rules, processes=self.rules.processes + holder)

    @property
    def _keepers_in_mps(self) -> bool:
        exclusive = any(gpu.modes.compute.startswith("exclusive") for gpu in self.gpus)
        return exclusive or "keepers_in_mps" in self.fallbacks

    @property
    def alone(self) -> bool:
        """Whether the unit is for the one engine of its only model, which has all SMs."""
        return len(self.one_engine) == len(self.shares) == 1

    @property
    def one_at_a_time(self) -> bool:
        """Whether only one engine may compute at a time: without MPS, engines whose ranks wait for each other would be
        taken off their GPUs at different times."""
        unshared = self.sharing == "off" or "fcfs" in self.fallbacks
        return unshared and not self.alone and self.ranks > self.stages

    def too_many_clients(self) -> str:
        """Why an MPS server cannot take all processes of the unit; empty if it can."""
        models = len(awake := self._awake_at_once)
        clients = self._clients(awake)
        if not self.named:
            clients += at_rest(self.resting(self.sleeping).values(), self.resting_room) * self._most_engines
        if clients <= MOST_CLIENTS:
            return ""
        at_once = " that have room at once" if self.sleeping else ""
        return (
            f"{models} models{at_once} are {clients} clients of the MPS server on each GPU, which takes {MOST_CLIENTS}"
        )

    @property
    def _most_engines(self) -> int:
        """Engines of the model that has most of those that sleep."""
        return max((each.engine_count for each in self.sleeping), default=1)

    def _clients(self, models: Collection[str]) -> int:
        """Clients of the MPS server on each GPU when these models are awake."""
        if self.sharing == "off":
            return 0
        counts = {each.model: each.engine_count for each in (*self.sleeping, *self.needs)}
        engines = sum(counts.get(model, 2) for model in models)
        # With the migrator, and with what keeps memory where a GPU lets clients in only.
        return engines + 1 + (len(models) + 1 if self._keepers_in_mps else 0)

    @property
    def _awake_at_once(self) -> list[str]:
        """As many models as can have engines at the same time, whatever the pools take."""
        if not self.sleeping:
            return [*self.shares]
        # The tightest GPU is that of any rank: estimates are alike on all of them.
        room = min(int(gpu.memory_bytes * self.rules.utilisation) for gpu in self.gpus) - self.rules.reserve_bytes
        asleep = {each.model for each in self.sleeping}
        room -= sum(self._taken(each) for each in self.needs if each.rank == 0 and each.model not in asleep)
        awake = [name for name in self.shares if name not in asleep]
        for each in sorted((each for each in self.sleeping if each.rank == 0), key=self._taken):
            room -= self._taken(each)
            if room < 0:
                break
            awake.append(each.model)
        return awake

    def _taken(self, needs: Needs) -> int:
        return needs.weights_bytes + needs.engines(self._memory_rules)

    def with_sleeping(self, models: Collection[str], resting: int | None = None, pools: int | None = None) -> GpuUnit:
        """The same where those of its models sleep until they are woken.

        Args:
            resting: bytes of each GPU for their engines meanwhile; None: see `resting_room`.
            pools: bytes of the pools on each GPU; None: what is left.
        """
        sleeping = tuple(each for each in self.needs if each.model in models)
        awake = [each for each in self.needs if each.model not in models]
        if resting is None:
            memory = min(gpu.memory_bytes for gpu in self.gpus)
            usable = int(memory * self.rules.utilisation)
            room = usable - self.rules.reserve_bytes - sum(self.taken(awake).values())
            room -= int(LEAST_POOL_PART * usable) if pools is None else pools
            resting = resting_room(self.taken(sleeping).values(), self.resting(sleeping).values(), room, memory)
        made, most = self._with_resting(sleeping, resting), len(models)
        # Engines that rest are clients of an MPS server as others are. Where nobody asks for one, there may be none.
        while self.named and resting and (most := made._clients_left) < len(models):
            less = most * max(self.resting(sleeping).values()) // GRANULARITY * GRANULARITY
            if less >= resting:
                break
            resting = less
            made = self._with_resting(sleeping, resting)
        if not resting or not most:
            return made.present(awake)
        return replace(made, resting_room=RestingSpec(resting, most)).present(awake)

    def _with_resting(self, sleeping: tuple[Needs, ...], resting: int) -> GpuUnit:
        rules = replace(self.rules, reserve_bytes=self.rules.reserve_bytes + resting)
        return replace(self, sleeping=sleeping, rules=rules)

    @property
    def _clients_left(self) -> int:
        """The engines of how many models an MPS server takes besides those of the models that are awake."""
        if self.sharing == "off":
            return MOST_CLIENTS
        return max(0, MOST_CLIENTS - self._clients(self._awake_at_once)) // self._most_engines

    def resting(self, needs: Sequence[Needs]) -> dict[str, int]:
        """Bytes by model that its engines take while they rest, on the GPU where it is most."""
        found: dict[str, int] = {}
        for each in needs:
            found[each.model] = max(found.get(each.model, 0), each.resting(self._memory_rules))
        return found

    def present(self, needs: Sequence[Needs]) -> GpuUnit:
        """The same with those models at the start. If all of the others sleep, the largest of these has to have room,
        too."""
        asleep = {each.model for each in self.sleeping}
        if not asleep or any(each.model in asleep for each in needs):
            return self.measured(needs)
        largest = max(self.sleeping, key=lambda each: (self._taken(each), each.model)).model
        return self.measured([*needs, *(each for each in self.sleeping if each.model == largest)])

    def taken(self, needs: Sequence[Needs]) -> dict[str, int]:
        """Bytes of weights and engines by model, on the GPU where it takes most."""
        found: dict[str, int] = {}
        for each in needs:
            found[each.model] = max(found.get(each.model, 0), self._taken(each))
        return found

    def measured(self, needs: Sequence[Needs]) -> GpuUnit:
        """The same with what was measured of the models that are there."""
        return replace(self, needs=tuple(needs))

    def budgets(self, demands: Sequence[ModelDemand]) -> list[Budget]:
        """What the memory of each GPU goes to."""
        return self._budgets(_least_page(demands))

    def memory_words(self, demands: Sequence[ModelDemand]) -> list[str]:
        """What takes the memory of the tightest GPU, by kind, and how many models have engines at once, in words."""
        number, tightest = min(enumerate(self.budgets(demands)), key=lambda each: each[1].pool_bytes)
        needs = [each for each in self.needs if each.rank == number]
        rules = self._memory_rules
        processes = [each.engine_count + rules.processes - rules.engines for each in needs]
        figures = {
            "weights": sum(each.weights_bytes for each in needs),
            "contexts": sum(n * each.context_bytes for n, each in zip(processes, needs, strict=True)),
            "graphs": sum(each.engine_count * rules.graph_sets * each.graph_bytes for each in needs),
            "activations": sum(each.engine_count * each.activation_bytes for each in needs),
            "left for the KV pool": max(0, tightest.pool_bytes),
        }
        by_kind = ", ".join(f"{what} {format_size(size)}" for what, size in figures.items())
        engines = sum(each.engine_count for each in needs)
        words = [f"{tightest.gpu}: {by_kind} (estimated); {engines} engines, {sum(processes)} contexts"]
        awake = len(self._awake_at_once)
        at_once = f"{awake} of {len(self.shares)} models can be awake at once (weights and engines on the GPU)"
        return [*words, f"{at_once}, beside the smallest KV pool"]

    def _budgets(self, page_bytes: int) -> list[Budget]:
        return [
            budget(
                f"GPU {gpu.index} ({gpu.name})",
                gpu.memory_bytes,
                gpu.used_bytes,
                [each for each in self.needs if each.rank == rank],
                page_bytes,
                self._memory_rules,
            )
            for rank, gpu in enumerate(self.gpus)
        ]

    def used(self, demands: Sequence[ModelDemand], pools_bytes: int) -> int:
        """Bytes that the models of `needs`, pools of `pools_bytes` and all else take of the GPU with least left."""
        return self._used(_least_page(demands), pools_bytes)

    def used_with(self, pools: Sequence[PoolSpec]) -> int:
        """The same with those pools."""
        whole, start = sum(pool.bytes for pool in pools), sum(pool.start_bytes for pool in pools)
        # Page tables have entries for all pages.
        return self._used(min(pool.page_bytes for pool in pools), whole) - whole + start

    def _used(self, page_bytes: int, pools_bytes: int) -> int:
        return max(each.used(pools_bytes, page_bytes) for each in self._budgets(page_bytes))

    def check_room(self, joining: Sequence[Needs], pools: Sequence[PoolSpec], found: GpuMachine, loaded: bool) -> None:
        """Whether a model more fits beside the pools that the unit has, and the models of its `needs`.

        Args:
            joining: of that model on each GPU.
            found: the GPUs as the driver has them now.
            loaded: the model's weights are there by now.

        Raises:
            muxserve.gpu.budget.BudgetError: it does not fit.
        """
        size = sum(pool.start_bytes for pool in pools)  # the other memory comes to them when nobody needs it
        together = self.measured([*self.needs, *joining])
        budgets = together._budgets(min(pool.page_bytes for pool in pools))
        for each in joining:
            now = found.by_uuid(self.gpus[each.rank].uuid)
            free = None if now is None or not now.memory_bytes else now.free_bytes
            check_room(budgets[each.rank], each, size, free, self._memory_rules, loaded)

    def pool(self, demands: Sequence[ModelDemand], asked: int | None) -> int:
        """Bytes of the pools on each GPU: `asked`, or all that is left; where models sleep, a part of it.

        Raises:
            muxserve.gpu.budget.BudgetError: that is not there, or not enough for one sequence of every model.
        """
        budgets = self.budgets(demands)
        if self.sleeping and asked is None and self.deployed.ipc == "legacy":
            usable = min(gpu.memory_bytes for gpu in self.gpus) * self.rules.utilisation
            asked = max(least_pool_bytes(demands, self.together(demands)), int(LEAST_POOL_PART * usable))
        elif self.sleeping and asked is None:
            usable = min(gpu.memory_bytes for gpu in self.gpus) * self.rules.utilisation
            sleeping = self.taken(self.sleeping)
            there = sum(sleeping[name] for name in {each.model for each in self.needs} & sleeping.keys())
            least = max(least_pool_bytes(demands, self.together(demands)), int(LEAST_POOL_PART * usable))
            pools = pool_beside(pool_bytes(budgets) + there, list(sleeping.values()), least)
            asked = pools - pools % GRANULARITY
        needed = asked or least_pool_bytes(demands, self.together(demands))
        check(budgets, self.needs, needed, self._memory_rules, bool(self.sleeping))
        return asked or pool_bytes(budgets)

    def together(self, demands: Sequence[ModelDemand]) -> int | None:
        """How many of the models that sleep can be awake at a time at most, whatever pools and engines take; None where
        none sleeps."""
        if not self.sleeping:
            return None
        asleep = {each.model for each in self.sleeping}
        usable = int(min(gpu.memory_bytes for gpu in self.gpus) * self.rules.utilisation)
        awake = self.taken([each for each in self.needs if each.model not in asleep])
        room = usable - self.rules.reserve_bytes - sum(awake.values())
        return awake_together([each for each in demands if each.name in asleep], room)

    def describe(self) -> list[str]:
        """GPUs and shares in words."""
        gpus = f"GPU {', '.join(f'{gpu.index} ({_kind(gpu)})' for gpu in self.gpus)}"
        if self.elsewhere:
            plural = "s" * (self.ranks > 1)
            gpus = f"{self.ranks} GPU{plural} ({_kind(self.gpus[0])}) of whichever machine has them free"
        if self.alone:
            per_stage = self.ranks // self.stages
            stages = f"; its layers in {self.stages} stages of {per_stage} GPU{'s' * (per_stage > 1)}"
            split = stages if self.stages > 1 else ""
            return [f"{gpus}: one engine of both phases has all SMs{split}", *self.notes]
        how = {
            "mps": "engines share the SMs by percentages of MPS"
            if self.has_percentages
            else "engines run side by side under MPS, without percentages",
            "green_contexts": "engines have SMs of their own (green contexts under MPS)"
            + ", which each lease chooses anew" * (self.rules.graph_sets > 1),
            "off": "engines alternate on the GPU (no MPS)" + (", one at a time" if self.one_at_a_time else ""),
        }
        condition = ", if MPS works there" if self.elsewhere and self.sharing != "off" else ""
        words = [f"{gpus}: {how[self.sharing]}{condition}"]
        if self.sharing != "off":
            two = {name: share for name, share in self.shares.items() if name not in self.one_engine}
            if two:
                each = ", ".join(f"{name} {s.prefill:.0%}/{s.decode:.0%}" for name, s in two.items())
                words.append(f"SM shares of prefill/decode: {each}")
            if self.one_engine:
                each = ", ".join(f"{name} {self.shares[name].decode:.0%}" for name in self.one_engine)
                words.append(f"SM shares of models with one engine: {each}")
        return [*words, *self.notes]


def _least_page(demands: Sequence[ModelDemand]) -> int:
    """Bytes of the smallest page of the pools; without pools, of one that nobody takes."""
    return min((group.page_bytes for group in pool_groups(demands)), default=LEAST_PAGE)


def _kind(gpu: Gpu) -> str:
    return f"{gpu.name}, {format_size(gpu.memory_bytes)}"


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes that everything takes of the GPU with least left, and in that by model those that sleep at times, and the
    `pools`, as far as they have memory at any time. `copies`:
    bytes of the host's memory for weights, by model; `resting`: models that sleep and whose engines have stayed."""

    total: int
    models: Mapping[str, int]
    pools: int = 0
    copies: Mapping[str, int] = field(default_factory=dict)
    resting: tuple[str, ...] = ()


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
        gpu = self.unit.present(needs)
        size = gpu.pool(self.demands, self.pool_bytes)
        plan = plan_unit(self.demands, self.machine, self.cores, size, together=gpu.together(self.demands))
        return plan, gpu.budgets(self.demands)

    def check_room(
        self,
        served: Sequence[Needs],
        joining: Sequence[Needs],
        pools: Sequence[PoolSpec],
        found: GpuMachine,
        loaded: bool = False,
    ) -> None:
        """Whether a model more fits into the unit that runs, beside those that are `served`; see `GpuUnit.check_room`.

        Raises:
            muxserve.gpu.budget.BudgetError: it does not fit.
        """
        self.unit.measured(served).check_room(joining, pools, found, loaded)

    @property
    def estimated(self) -> tuple[Needs, ...]:
        """What the models that are loaded at the start are thought to need."""
        return self.unit.needs

    @property
    def sleeping(self) -> tuple[Needs, ...]:
        """Estimates of the models that are loaded when they are woken."""
        return self.unit.sleeping

    def resting(self, needs: Sequence[Needs]) -> int:
        """Bytes of each GPU that the engines of the one model with these `needs` take while they rest."""
        return max(self.unit.resting(needs).values(), default=0)

    def used(self, present: Sequence[Needs], pools: Sequence[PoolSpec]) -> GpuMemory:
        """What is taken with the models that are `present`."""
        asleep = {each.model for each in self.sleeping}
        unit = self.unit.measured(present)
        taken = unit.taken([each for each in present if each.model in asleep])
        return GpuMemory(unit.used_with(pools), taken, sum(pool.start_bytes for pool in pools))

    def with_model(self, demand: ModelDemand, needs: Sequence[Needs], shares: Mapping[str, SmShares]) -> GpuPlan:
        """The plan with a model more; of those that it has only the ones with `shares` are left."""
        kept = [each for each in self.demands if each.name in shares and each.name != demand.name]
        names = {each.name for each in kept}
        left, asleep = (tuple(each for each in of if each.model in names) for of in (self.unit.needs, self.sleeping))
        if demand.sleeps:
            asleep = (*asleep, *needs)
        else:
            left = (*left, *needs)
        one = [name for name in self.unit.one_engine if name in names]
        if demand.one_engine:
            one.append(demand.name)
        unit = replace(self.unit, shares=dict(shares), needs=left, sleeping=asleep, one_engine=tuple(one))
        if (room := unit.resting_room) is not None:
            most = min(len({each.model for each in asleep}), unit._clients_left)
            unit = replace(unit, resting_room=RestingSpec(room.bytes, most))
        return replace(self, unit=unit, demands=(*kept, demand))

    def to_json(self) -> bytes:
        """For another machine."""
        return msgspec.json.encode(self)


def from_json(data: bytes) -> GpuPlan:
    """What `GpuPlan.to_json` made.

    Raises:
        msgspec.ValidationError: it is none.
    """
    return msgspec.json.decode(data, type=GpuPlan)


class SizingError(Exception):
    """The GPUs have too little memory for the unit; the message says what to change. `passing`: the driver may have
    more free in a moment."""

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


class PoolSizer:
    """Plans the pools of a unit's spec anew when its models have been measured, and writes that down; says later
    whether a model more fits beside them."""

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

    def check_room(
        self,
        served: Sequence[Needs],
        joining: Sequence[Needs],
        pools: Sequence[PoolSpec],
        found: GpuMachine,
        loaded: bool = False,
    ) -> None:
        """Whether a model that needs `joining` fits beside those that are `served` and the `pools`.

        Raises:
            SizingError: it does not fit, in words and numbers.
        """
        try:
            self._plan.check_room(served, joining, pools, found, loaded)
        except BudgetError as error:
            raise SizingError(str(error), isinstance(error, NotFreeError)) from None

    @property
    def sleeping(self) -> tuple[Needs, ...]:
        """Estimates of the models that are loaded when they are woken."""
        return self._plan.sleeping

    def estimates(self, models: Collection[str]) -> list[Needs]:
        """What those models were thought to need before anything was measured."""
        return [needs for needs in self._plan.estimated if needs.model in models]

    def expect(self, needs: Collection[Needs]) -> None:
        """A model has come that is loaded when it is woken."""
        models = {each.model for each in needs}
        others = (each for each in self.sleeping if each.model not in models)
        self._plan = replace(self._plan, unit=replace(self._plan.unit, sleeping=(*others, *needs)))

    def resting(self, needs: Sequence[Needs]) -> int:
        """Bytes of each GPU that the engines of the one model with these `needs` take while they rest."""
        return self._plan.resting(needs)

    def used(self, present: Sequence[Needs], pools: Sequence[PoolSpec]) -> GpuMemory:
        """What is taken with the models that are `present`."""
        return self._plan.used(present, pools)


def resized(unit_spec: UnitSpec, unit: UnitPlan) -> UnitSpec:
    """The unit's spec with the pools of a plan for the same models; all else stays as it was."""
    models = [
        msgspec.structs.replace(
            model,
            pool=plan.pool,
            block_tokens=plan.table.block_tokens,
            num_blocks=plan.table.num_blocks,
            quota_pages=plan.quota_pages,
            floor_pages=plan.floor_pages,
            max_len=plan.max_len,
            kv_bytes=plan.cache_bytes,
        )
        for model, plan in zip(unit_spec.models, unit.models, strict=True)
    ]
    pools = [
        msgspec.structs.replace(known, page_bytes=pool.page_bytes, num_pages=pool.num_pages)
        for known, pool in zip(unit_spec.pools, unit.pools, strict=True)
    ]
    pools = [in_chunks(pool, unit_spec.gpu) if pool.chunk_bytes else pool for pool in pools]
    return msgspec.structs.replace(unit_spec, pools=pools, models=models)
