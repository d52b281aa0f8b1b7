"""What `muxserve deploy` serves: units of this machine, on its CPU or its GPUs, planned here or by a plan file.

Without a plan file unit `u0` has all models that share units, `u1` those with at least two replicas at the start, and
so on; then each replica of a model over several stages, or over whose replicas prefill rolls, has one to
itself. A unit that is started later has one model
alone. With a plan file the units are the plan's. All replicas of a model have blocks of the same size, so that requests
can move between them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from muxserve.cluster.steps import Addition, JoinedUnit
from muxserve.cluster.units import PlannedUnit
from muxserve.config import AUTO, Fleet, FleetError, Model
from muxserve.control.changes import ChangeError, NoRoomError, Tell
from muxserve.costs.latency import LatencyModel
from muxserve.costs.roofline import Roofline
from muxserve.gpu.nvml import Gpu, GpuChoiceError, GpuMachine, choose
from muxserve.gpu.unit import LEAST_POOL_PART, GpuUnit
from muxserve.planning.candidates.device_pool import CPU
from muxserve.planning.candidates.layouts import asks_for_choice
from muxserve.planning.candidates.resident_units import NoUnitError, resident_units
from muxserve.planning.demand.checkpoints import (
    CheckpointError,
    Hub,
    HuggingFaceHub,
    architecture_of,
    fetch,
    without_chat_template,
)
from muxserve.planning.demand.demands import demands_of, with_adapters
from muxserve.planning.demand.downloads import OnBytes, in_lines
from muxserve.planning.demand.private import with_shapes
from muxserve.planning.specs.gpus import gpu_unit, resident_policy, resident_rules
from muxserve.planning.specs.joining import JoinedModel, Joining, remaining_capacity, same_table
from muxserve.planning.specs.plan_file import load_plan
from muxserve.planning.specs.residency import (
    NoMemoryError,
    as_declared,
    cpu_wake_costs,
    resident_costs,
    with_model,
    within_limit,
    without_model,
)
from muxserve.planning.specs.unit_demands import model_demands
from muxserve.planning.specs.unit_models import (
    UnitModels,
    arranged,
    as_placed,
    check_awake,
    check_replicas,
    like,
    on_gpus,
    parts_of,
    possible_units,
    together,
    who_replicates,
    wrong,
)
from muxserve.planning.specs.unit_plan import ResolvedUnit, check_together, resolve_unit
from muxserve.planning.specs.unit_specs import planned_unit, scaling_of, settings_of
from muxserve.spec import (
    FleetSpec,
    ModelSpec,
    ResidencySpec,
    SimulatedSpec,
    UnitEntry,
    UnitSpec,
    next_version,
    public_name,
)
from placement import Machine, pool_groups
from placement.cluster import PlacedUnit
from placement.format import enumerate_words


class FleetPlanner:
    """Plans the units of a fleet: those at its start, and later ones.

    Args:
        fleet: as declared. Once `at_start` has planned it, `fleet` has the engines of every model that left these
            open; it may be replaced by one with other model paths.
        machine: cores and memory before anything is started. Later `machine` has as much memory as the fleet may take.
        gpus: asked for the machine's GPUs if the fleet or its plan wants some.
        simulated: what engines only pretend to compute on; their weights take no memory then.
        latency: what steps are predicted to cost, against which those of engines are held; by default what engines
            pretend, or the roofline.

    Raises:
        FleetError: the fleet may take more memory than there is.
    """

    def __init__(
        self,
        fleet: Fleet,
        machine: Machine,
        gpus: Callable[[], GpuMachine],
        hub: Hub | None = None,
        simulated: SimulatedSpec | None = None,
        latency: LatencyModel | None = None,
    ) -> None:
        self.fleet = fleet
        self.latency = latency or Roofline()
        self.simulated = simulated
        # Why models have the engines that they have, of those that left that open.
        self.reasons: list[str] = []
        self._hub = hub or HuggingFaceHub()
        if simulated is not None:
            machine = _without_weights(machine, fleet, self._hub)
        self._whole = machine
        self.machine = machine if self._wants_gpus else within_limit(fleet, machine)
        self._gpus = gpus
        # The GPUs of the fleet, also those that no unit uses yet, and how many a unit gets.
        self._chosen: tuple[Gpu, ...] = ()
        self._per_unit = 0

    def fetched(self, fleet: Fleet, tell: Callable[[str], None], on_bytes: OnBytes | None = None) -> Fleet:
        """`fleet`, of which models were declared anew, with a local directory for every model.

        Args:
            tell: called when the download of a model begins.
            on_bytes: called while it goes on.

        Raises:
            FleetError: a download failed.
        """
        weights = self.simulated is None
        return fetch(fleet, tell, HuggingFaceHub(weights, on_bytes=on_bytes), weights)

    @property
    def _on_ray(self) -> bool:
        return self.fleet.cluster.launcher == "ray"

    @property
    def _wants_gpus(self) -> bool:
        return bool(self.fleet.cluster.gpus or self.fleet.cluster.gpu_ids)

    # ------------------------------------------------------------ at the start

    def at_start(self, plan_file: str | os.PathLike[str] | None = None) -> list[ResolvedUnit]:
        """The units at the start.

        Args:
            plan_file: what `muxserve plan -o` has written.

        Raises:
            FleetError: the fleet does not fit, its models cannot be served, or the plan is not for this machine.
        """
        fleet = self.fleet
        if fleet.cluster.nodes:
            message = "nodes are for muxserve plan and simulate; write `gpus` (with `launcher: ray`, of all machines)"
            raise FleetError([fleet.problem(("cluster", "nodes"), message)])
        if self._on_ray and fleet.cluster.gpu_ids:
            message = "with `launcher: ray` it is Ray that chooses GPUs; write `gpus`, how many there are for all units"
            raise FleetError([fleet.problem(("cluster", "gpu_ids"), message)])
        if plan_file is None:
            if self._wants_gpus:
                self._choose(len(fleet.cluster.gpu_ids) or fleet.cluster.gpus)
            self.tell_engines(fleet)
        plans = self._planned() if plan_file is None else self._placed(plan_file)
        if plans[0].gpu is None and not self._on_ray:
            check_together(fleet, plans, self.machine)
        return plans

    def tell_engines(self, fleet: Fleet) -> None:
        """Say what models have whose file asks for a choice of their engines: without a plan there is none."""
        for model in fleet.models:
            if asks_for_choice(model):
                self.reasons.append(f"`engines: auto` of {model.name} is {model.shape} {self._without_choice}")

    @property
    def _without_choice(self) -> str:
        if not self._wants_gpus:
            return "on a CPU"
        if self.fleet.memory is not None:
            return "where memory decides which models are awake"
        return "without a plan; `muxserve plan -o` chooses by simulation, and `deploy --plan` serves that"

    def _planned(self) -> list[ResolvedUnit]:
        fleet = self.fleet
        parts = list(parts_of(fleet))
        gpus: list[GpuUnit | None] = [None] * len(parts)
        if self._wants_gpus:
            if fleet.memory is not None:
                parts = self._resident_parts()
            on = self._with_gpus([part.fleet for part in parts])
            gpus = [gpu_unit(each, self._gpus(), self._hub) for each in on]
            parts = [part._replace(fleet=each) for part, each in zip(parts, on, strict=True)]
        blocks = self._block_tokens(gpus[0])
        units = max(len(parts), self._sharing())
        return [
            replace(
                resolve_unit(part.fleet, self.machine, self._hub, gpu, units=units, block_tokens=blocks),
                name=f"u{number}",
                serves=part.serves,
            )
            for number, (part, gpu) in enumerate(zip(parts, gpus, strict=True))
        ]

    def _with_gpus(self, parts: Sequence[Fleet]) -> list[Fleet]:
        """The parts with GPUs of their own. Those of units that may be started later stay free."""
        fleet, cluster = self.fleet, self.fleet.cluster
        if fleet.memory is not None:
            return list(parts)
        possible = possible_units(fleet)
        count = len(self._chosen)
        self._per_unit, rest = divmod(count, possible)
        if possible == 1:
            return list(parts)
        key = ("cluster", "gpu_ids" if cluster.gpu_ids else "gpus")
        if not self._per_unit:
            message = f"{count} are too few for {possible} units, one for each replica ({who_replicates(fleet)})"
            raise FleetError([fleet.problem(key, f"{message}; each needs a GPU of its own at least")])
        if rest:
            message = f"{count} cannot be divided evenly among {possible} units ({who_replicates(fleet)})"
            raise FleetError([fleet.problem(key, f"{message}; give a multiple of {possible}, or fewer replicas")])
        return [
            on_gpus(part, self._chosen[number * self._per_unit :][: self._per_unit])
            for number, part in enumerate(parts)
        ]

    def _resident_parts(self) -> list[UnitModels]:
        """The units of a fleet in which memory decides who is awake, each with its GPUs.

        Raises:
            FleetError: a model has no room.
        """
        fleet, gpus = self.fleet, self._chosen
        rules, smallest = resident_rules(fleet, gpus), min(gpu.memory_bytes for gpu in gpus)
        asked = demands_of(fleet, Path(), self._hub, [(gpu.name, gpu.memory_bytes) for gpu in gpus])
        demands = with_shapes(fleet, asked)
        always = frozenset(model.name for model in fleet.models if model.keep == "always")
        size = fleet.kv_pool.size
        pool = size if isinstance(size, int) else int(LEAST_POOL_PART * rules.utilisation * smallest)
        try:
            units = resident_units(demands, always, len(gpus), smallest, rules, pool)
        except NoUnitError as error:
            raise FleetError([fleet.problem(("memory",), str(error))]) from None
        parts, first = [], 0
        for unit in units:
            models = [fleet.model(name) for name in unit.models]
            serves = tuple(model.name for model in models if model.replicas.at_start)
            one_engine = [each.name for each in demands if each.shape == "one" and each.name in unit.models]
            part = on_gpus(fleet.with_models(models), gpus[first : first + unit.gpus])
            parts.append(UnitModels(part.with_policy(resident_policy(part, one_engine)), serves))
            first += unit.gpus
        if first < len(gpus):
            unused = f"{len(gpus) - first} of {len(gpus)} GPUs" if first else "all GPUs"
            self.reasons.append(f"{unused} stay unused: no unit of the sizes that the models need fits there")
        return parts

    def _choose(self, count: int) -> None:
        try:
            self._chosen = choose(self._gpus(), count, self.fleet.cluster.gpu_ids)
        except GpuChoiceError as error:
            raise FleetError([self.fleet.problem(("cluster", error.key), str(error))]) from None

    def _block_tokens(self, gpu: GpuUnit | None, several: bool = False) -> dict[str, int]:
        """Tokens of a block of the models that share units, as if they were all in one; nothing if one is all there can
        be."""
        shared = together(self.fleet)
        if not shared.models or (possible_units(shared) == 1 and not several):
            return {}
        groups = pool_groups(model_demands(shared, self.machine, self._hub, gpu, {}))
        return {name: tokens for g in groups for name, tokens in zip(g.models, g.block_tokens, strict=True)}

    def _sharing(self) -> int:
        """How many units the memory of a machine is for. On Ray they are spread over machines like this one."""
        alone = self._on_ray and self.fleet.cluster.ray.placement == "spread"
        return 1 if alone else possible_units(self.fleet)

    # ------------------------------------------------------------ as a plan has it

    def _placed(self, plan_file: str | os.PathLike[str]) -> list[ResolvedUnit]:
        check_awake(self.fleet)
        placement = load_plan(plan_file, self.fleet)
        units = placement.units
        fleet = self.fleet = arranged(self.fleet, plan_file, units)
        on_gpus = {unit.device for unit in units} != {CPU}
        if on_gpus and len(placement.cluster.nodes) > 1 and not self._on_ray:
            count = len(placement.cluster.nodes)
            raise wrong(plan_file, f"the plan is for {count} machines with GPUs; several need `launcher: ray`")
        if on_gpus and CPU in {unit.device for unit in units}:
            raise wrong(plan_file, "the plan has units on CPU and on GPUs; this version serves one kind")
        check_replicas(fleet, plan_file, units)
        parts = [as_placed(fleet, unit, self.machine.cores) for unit in units]
        gpus: list[GpuUnit | None] = [None] * len(units)
        if not on_gpus and self._wants_gpus:
            raise wrong(plan_file, "the plan is for a CPU, but the fleet file wants GPUs; make it anew")
        if on_gpus:
            found = self._gpus()
            parts = self._on_planned_gpus(plan_file, units, parts)
            gpus = [gpu_unit(part, found, self._hub, unit) for part, unit in zip(parts, units, strict=True)]
        blocks = self._block_tokens(gpus[0], several=len(units) > 1)
        return [
            replace(
                resolve_unit(part, self.machine, self._hub, gpu, units=len(units), block_tokens=blocks),
                name=f"u{number}",
            )
            for number, (part, gpu) in enumerate(zip(parts, gpus, strict=True))
        ]

    def _on_planned_gpus(
        self, plan_file: str | os.PathLike[str], units: Sequence[PlacedUnit], parts: Sequence[Fleet]
    ) -> list[Fleet]:
        """The parts with the GPUs that stand for the devices of the plan, in their order."""
        cluster = self.fleet.cluster
        devices = sorted(number for unit in units for number in unit.devices)
        have = len(cluster.gpu_ids) or cluster.gpus
        several = len(units) > 1 or have > len(devices)
        if self._wants_gpus and have < len(devices):
            what = f"unit has {len(devices)} GPUs" if len(units) == 1 else f"units have {len(devices)} GPUs"
            raise wrong(plan_file, f"the plan's {what}, the fleet file {have}; make it anew")
        self._choose(have or len(devices))
        self._per_unit = len(units[0].devices)
        if not several:
            return list(parts)
        gpus = dict(zip(devices, self._chosen, strict=False))
        return [
            on_gpus(part, [gpus[number] for number in unit.devices]) for part, unit in zip(parts, units, strict=True)
        ]

    # ------------------------------------------------------------ later

    def unit(self, name: str, models: Sequence[str], running: FleetSpec) -> ResolvedUnit:
        """A unit more, beside those that run; asks for nothing that takes long.

        Its replicas are as those of the models that the fleet offers: the same blocks and lengths.

        Raises:
            NoRoomError: it does not fit.
        """
        units = [entry.unit_spec for entry in running.units]
        offered = {model.name: model for unit in units for model in unit.models}
        offered |= {model.name: model for model in running.models}
        fleet = self.fleet.with_models([like(self.fleet.model(each), offered.get(each)) for each in models])
        blocks = {each: offered[each].block_tokens for each in models if each in offered}
        try:
            gpu = None
            machine = self.machine
            if self._chosen:
                gpu = self._free_gpus(fleet, units)
            elif not self._on_ray:
                machine = remaining_capacity(machine, self.fleet, units, self._hub)
            count = max(self._sharing(), len(units) + 1)
            plan = resolve_unit(fleet, machine, self._hub, gpu, units=count, block_tokens=blocks)
        except FleetError as error:
            words = "; ".join(problem.message for problem in error.problems)
            raise NoRoomError(
                f"there is no room for a unit with {enumerate_words(list(models))} more: {words}"
            ) from None
        return replace(plan, name=name)

    def joined(self, planned: PlannedUnit, model: str, running: FleetSpec) -> JoinedModel:
        """A running unit, started as `planned`, that has the declared model, too (`joining`). A model that is
        served elsewhere is as it is there; a version of one that serves takes sequences as long as that, if it can.

        Raises:
            NoRoomError: no pool of the unit suits it, or pool, memory or MPS have no room.
        """
        if planned.gpu is None and _gpus_of(planned.unit_spec):
            message = "on pretended GPUs no model joins a unit that runs; add it to the fleet's file and deploy again"
            raise NoRoomError(f"{model} cannot join {planned.name}: {message}")
        others = [entry.unit_spec for entry in running.units if entry.name != planned.name]
        offered = {each.name: each for each in running.models}
        before = offered.get(running.serving(public_name(model)))
        if model in offered:
            declared = like(self.fleet.model(model), offered[model])
        else:
            declared = self._as_long(self.fleet.model(model), before)
        joining = Joining(
            fleet=self.fleet.with_models([declared if each.name == model else each for each in self.fleet.models]),
            model=model,
            planned=planned,
            unit=running.unit(planned.name).unit_spec,
            # On Ray the machine stands for each of the cluster's.
            others=[] if self._on_ray else others,
            machine=self.machine,
            hub=self._hub,
            latency=self.latency,
            before="" if before is None else before.name,
        )
        return joining.on_cpu() if planned.gpu is None else joining.on_gpu(self._gpus())

    def _as_long(self, model: Model, before: ModelSpec | None) -> Model:
        """`model` for sequences as long as those of the version `before`, where the file leaves that open."""
        if before is None or model.max_len != AUTO:
            return model
        try:
            longest = architecture_of(model, self._hub, on_gpus=True).default_max_len
        except CheckpointError:
            return model  # planning says so
        return model.model_copy(update={"max_len": min(before.max_len, longest)})

    def residency(self, running: FleetSpec, joined: JoinedModel, model: str) -> ResidencySpec | None:
        """By what memory decides in a unit that the model joins; None where it decides nothing.

        Raises:
            NoRoomError: the memory has no room for it.
        """
        spec = running.residency.get(joined.unit_spec.unit)
        if spec is None:
            return None
        declared, dtype = self.fleet.model(model), joined.unit_spec.model(model).dtype
        plan = joined.planned.gpu
        architecture = with_adapters(declared, architecture_of(declared, self._hub, plan is not None), plan is not None)
        if plan is None:
            costs = cpu_wake_costs(declared, architecture, dtype)
        else:
            costs = resident_costs(declared, architecture, dtype, plan.unit, plan.unit.taken(joined.needs)[model])
        try:
            return with_model(spec, declared, costs)
        except NoMemoryError as error:
            raise NoRoomError(f"{model} cannot join {joined.unit_spec.unit}: {error}") from None

    def settings(self, wanted: Fleet, fleet: FleetSpec) -> FleetSpec:
        """`fleet` with what is followed of `wanted` while it serves.

        Raises:
            NoRoomError: what it may take of the memory is too little, or more than there is.
        """
        changed = settings_of(wanted, fleet)
        if not fleet.residency or wanted.memory is None:
            return changed
        try:
            # On GPUs it is of each of them, and stays.
            machine = self.machine if self._wants_gpus else within_limit(wanted, self._whole)
            limit = machine.memory_bytes
            residency = {unit: as_declared(spec, wanted, limit) for unit, spec in fleet.residency.items()}
        except FleetError as error:
            raise NoRoomError("; ".join(problem.message for problem in error.problems)) from None
        except NoMemoryError as error:
            raise NoRoomError(f"memory.limit: {error}") from None
        self.machine = machine
        return msgspec.structs.replace(changed, residency=residency)

    def _free_gpus(self, fleet: Fleet, units: Sequence[UnitSpec]) -> GpuUnit:
        if self._on_ray and self.simulated is None:
            # Which ones are free, Ray knows; they are all alike.
            free = list(self._chosen[sum(unit.ranks for unit in units) :])
        else:
            used = {uuid for unit in units for uuid in _gpus_of(unit)}
            free = [gpu for gpu in self._chosen if gpu.uuid not in used]
        names = {model.name for model in fleet.models}
        like_it = (unit for unit in units if names & {model.name for model in unit.models})
        count = next((len(_gpus_of(unit)) or unit.ranks for unit in like_it), self._per_unit)
        if len(free) < count:
            key = "gpu_ids" if self.fleet.cluster.gpu_ids else "gpus"
            message = f"it needs {count} GPUs of its own, and of the fleet's {len(self._chosen)} {len(free)} are free"
            raise FleetError([fleet.problem(("cluster", key), f"{message}; drain another unit, or deploy with more")])
        unit = gpu_unit(on_gpus(fleet, free[:count]), self._gpus(), self._hub)
        if unit.elsewhere:
            return unit
        sharing = next((each.gpu.sm_sharing for each in units if each.gpu is not None), unit.sharing)
        return replace(unit, sharing=sharing)

    # ------------------------------------------------------------ what is declared

    def declare(self, added: Fleet) -> None:
        """The fleet has the models of `added` from now on; of those that it has, as declared there."""
        new = {model.name for model in added.models}
        others = [each for each in self.fleet.models if each.name not in new]
        self.fleet = self.fleet.with_models([*others, *added.models])

    def forget(self, model: str) -> None:
        """The fleet has that model no longer."""
        self.fleet = self.fleet.with_models([each for each in self.fleet.models if each.name != model])


def notes_of(plans: Sequence[ResolvedUnit]) -> list[str]:
    """What was decided for the user, in words."""
    if len(plans) == 1:
        return list(plans[0].notes)
    whose: dict[str, list[str]] = {}
    for plan in plans:
        for note in plan.notes:
            whose.setdefault(note, []).append(plan.name)
    notes = [f"{enumerate_words(names)}: {note}" for note, names in whose.items()]
    if plans[0].gpu is None and plans[0].fleet.cluster.launcher == "local":
        notes.append(f"{len(plans)} units share the {plans[0].unit.cores} cores; each has a pool of its own")
    return notes


# ---------------------------------------------------------------- while the fleet serves


def _gpus_of(unit: UnitSpec) -> Sequence[str]:
    """The GPUs that a unit has, or pretends to have."""
    if unit.simulated is not None:
        return unit.simulated.gpus
    return unit.gpu.uuids if unit.gpu is not None else ()


def _without_weights(machine: Machine, fleet: Fleet, hub: Hub) -> Machine:
    """A machine with as much more memory as the fleet's weights are planned to take."""
    weights = 0
    for model in fleet.models:
        with contextlib.suppress(CheckpointError):  # planning says so
            weights += architecture_of(model, hub).weight_bytes("float32")
    return replace(machine, memory_bytes=machine.memory_bytes + weights)


class ScaleOut:
    """A `muxserve.cluster.steps.UnitPlanner` for the fleet that `planner` has planned."""

    def __init__(self, planner: FleetPlanner) -> None:
        self._planner = planner

    def unit(self, model: str, name: str, fleet: FleetSpec) -> PlannedUnit:
        """See `UnitPlanner.unit`."""
        plan = self._planner.unit(name, [model], fleet)
        simulated, latency = self._planner.simulated, self._planner.latency
        return planned_unit(plan, fleet.run_dir, fleet.keys, simulated, latency)

    def addition(self, declared: Fleet, names: Callable[[], str], fleet: FleetSpec, tell: Tell) -> Addition:
        """See `UnitPlanner.addition`."""
        declared = self._fetched(declared, tell)
        (model,) = declared.models
        self._planner.declare(declared)
        units: list[PlannedUnit] = []
        try:
            # One at least: without it nobody knows the model's layout, which the front end is built from.
            for _ in range(max(1, model.replicas.at_start)):
                units.append(self.unit(model.name, names(), _with(fleet, units)))
        except BaseException:
            self._planner.forget(model.name)
            raise
        return Addition(units[0].unit_spec.models[0], tuple(units), scaling_of(declared).get(model.name))

    def joined(self, declared: Fleet, unit: PlannedUnit, fleet: FleetSpec, tell: Tell) -> JoinedUnit:
        """See `UnitPlanner.joined`."""
        declared = self._fetched(declared, tell)
        (model,) = declared.models
        before = self._planner.fleet
        self._planner.declare(declared)
        try:
            joined = self._planner.joined(unit, model.name, fleet)
            made = joined.unit_spec.model(model.name)
            known = next((each for each in fleet.unit(unit.name).unit_spec.models if each.name == model.name), None)
            if known is not None and not same_table(known, made):
                # The unit keeps the page table of the model that was called so: this one is another version.
                self._planner.fleet = before
                version = declared.with_name(next_version(model.name, fleet.version_names))
                return self.joined(version, unit, fleet, tell)
            residency = self._planner.residency(fleet, joined, model.name)
        except BaseException:
            self._planner.fleet = before
            raise
        return JoinedUnit(made, *joined, scaling_of(declared).get(model.name), residency)

    def _fetched(self, declared: Fleet, tell: Tell) -> Fleet:
        """`declared`, whose only model is at hand; says what was decided of it.

        Raises:
            ChangeError: a download failed.
        """
        told = len(self._planner.reasons)
        try:
            declared = self._planner.fetched(declared, tell, in_lines(tell))
            self._planner.tell_engines(declared)
        except FleetError as error:
            raise ChangeError("; ".join(problem.message for problem in error.problems)) from None
        for reason in self._planner.reasons[told:]:
            tell(reason)
        if note := without_chat_template(declared.models[0]):
            tell(note)
        return declared

    def forget(self, model: str) -> None:
        """See `UnitPlanner.forget`."""
        self._planner.forget(model)

    @contextlib.contextmanager
    def trying(self, without: str = "") -> Iterator[None]:
        """See `UnitPlanner.trying`."""
        before = self._planner.fleet
        self._planner.forget(without)
        try:
            yield
        finally:
            self._planner.fleet = before

    def without(self, model: str, fleet: FleetSpec) -> dict[str, ResidencySpec]:
        """See `UnitPlanner.without`."""
        return {unit: without_model(spec, model) for unit, spec in fleet.residency.items()}

    def settings(self, wanted: Fleet, fleet: FleetSpec) -> FleetSpec:
        """See `UnitPlanner.settings`."""
        return self._planner.settings(wanted, fleet)


def _with(fleet: FleetSpec, units: list[PlannedUnit]) -> FleetSpec:
    """The fleet with units that are about to be started."""
    entries = [
        UnitEntry(unit.unit_spec, unit.unit_spec.unit_address, unit.unit_spec.migrator_address, list(unit.serves))
        for unit in units
    ]
    return msgspec.structs.replace(fleet, units=[*fleet.units, *entries])
