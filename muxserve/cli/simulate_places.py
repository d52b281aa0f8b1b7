"""Where the models of a fleet are simulated: the placements that belong to each mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from muxserve.cluster.machine import this_machine
from muxserve.config import AUTO, Fleet, load_fleet
from muxserve.costs.latency import LatencyModel
from muxserve.planning.candidates.dedicated_units import open_units
from muxserve.planning.candidates.device_pool import CPU, CpuPool, Surroundings, cpu_pool
from muxserve.planning.candidates.layouts import NoPlaceError, may_be_dedicated, shape_words
from muxserve.planning.candidates.resident_units import NoUnitError
from muxserve.planning.demand.demands import check_lengths, cluster_of, demands_of, memory_of
from muxserve.planning.demand.private import private_because
from muxserve.planning.place.prediction import Simulated, simulated_of
from muxserve.planning.place.sleeping import as_deployed
from muxserve.planning.place.this_machine import as_served, plan_machine, residency_here
from muxserve.planning.planner import SEARCH_SECONDS, Planner, options_of
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.plan_file import load_plan
from muxserve.planning.specs.unit_models import arranged, check_awake, check_replicas, units_at_start
from muxserve.planning.specs.unit_plan import resolve_unit
from muxserve.simulator import Mode
from muxserve.spec import ResidencySpec
from placement.cluster import Cluster, Placement
from placement.demand import Demand
from placement.format import enumerate_words
from placement.memory import MemoryRules
from placement.objective import Objective
from placement.planner import ClusterPlan

_MUXSERVE = "muxserve"


class PlacesError(ValueError):
    """The fleet cannot be placed so; the message says why."""


@dataclass(frozen=True, slots=True)
class PlacementSearch:
    """How placements are looked for, within about `seconds` each. `told` hears what goes on."""

    seconds: float = SEARCH_SECONDS
    seed: int = 0
    told: Callable[[str], None] = lambda _: None


@dataclass
class Places:
    """A fleet, what it runs on (`cluster`; None: the CPU of this machine), and where, by kind of placement (a mode's
    `placement`). Where several modes are compared (`compares`), a model may have no place in one of them: its requests
    fail there. `notes` are for the user, of what was decided when a placement was made."""

    about: str
    fleet: Fleet
    file: Path
    demands: list[Demand]
    latency: LatencyModel
    cluster: Cluster | None
    machine: CpuPool | None
    search: PlacementSearch
    compares: bool = False
    found: dict[str, Simulated] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, mode: Mode) -> Simulated:
        """Where the mode's models are.

        Raises:
            PlacesError: some model has no place, and no other mode is compared; or none has.
            FleetError: the units of this machine do not fit.
        """
        return self.placed(mode.placement)

    def placed(self, kind: str) -> Simulated:
        """The placement of that kind; made now if it is not there. Baselines know nothing but models of two engines.

        Raises:
            PlacesError, FleetError: as `of`.
        """
        known = self.found.get(kind)
        if known is None:
            known = self.found[kind] = self._on_gpus(kind) if self.cluster else self._on_cpu(kind)
        return known

    def _on_gpus(self, kind: str) -> Simulated:
        assert self.cluster is not None
        if kind == _MUXSERVE and self.fleet.memory is not None:
            try:
                return as_deployed(self.fleet, self.demands, self.cluster, self._around)
            except NoUnitError as error:
                raise PlacesError(str(error)) from None
        made = self._planner(kind).on_gpus(self.cluster)
        self._check(made.plan, kind)
        if made.rivals:
            words = made.rivals[0].words
            for name, unit in open_units(made.plan, self.fleet).items():
                how = shape_words(unit, name) or "two engines"
                self.notes.append(f"{name}: {how}, chosen by simulation ({words})")
        self.notes += made.notes
        return self.complete(made.plan.placement, self.demands, self._origin(kind, made.spare))

    def _origin(self, kind: str, spare: Mapping[str, float]) -> str:
        mode = "" if kind == _MUXSERVE else f" --mode {kind}"
        more = ", ".join(f"{name} {factor:.2f}x" for name, factor in spare.items())
        with_spare = f", with spare for {more} of the rate" if more else ""
        return f"placement as `muxserve plan{mode}` prints it{with_spare}"

    def _on_cpu(self, kind: str) -> Simulated:
        """All modes have the same cores. Baselines have one unit."""
        if kind == _MUXSERVE or (all(m.shape == "split" for m in self.fleet.models) and self._units == 1):
            made = self._planner(_MUXSERVE).on_cpu()
            self._check(made.plan, kind)
            self.notes += made.notes
            placed = self.complete(made.plan.placement, made.plan.demands, self._origin(_MUXSERVE, {}))
            return replace(placed, residency=self._residency(placed.placement))
        fleet = load_fleet(self.file)
        # A model with a cache of its own, or that answers with vectors, has one engine anyway.
        split = [
            model if each.shape == "one" and private_because(model, each.architecture) else model.with_engines("split")
            for model, each in zip(fleet.models, self.demands, strict=True)
        ]
        planned = resolve_unit(fleet.with_models(split), this_machine())
        demands = [as_served(demand, [planned]) for demand in self.demands]
        try:
            placement = plan_machine([planned], demands, self.latency, Objective()).placement
        except ValueError as error:
            raise PlacesError(str(error)) from None
        return self.complete(placement, demands, "placement of all models in one unit")

    def _residency(self, placement: Placement) -> dict[str, ResidencySpec]:
        """By what memory decides, as `muxserve deploy` has it.

        Raises:
            PlacesError: it would decide over several units, which are simulated each by itself.
        """
        if self.fleet.memory is not None and len(placement.units) > 1:
            raise PlacesError("with `memory` only fleets of one unit can be simulated")
        return residency_here(load_fleet(self.file), placement)

    @property
    def _around(self) -> Surroundings:
        own = self.fleet.cluster
        return Surroundings(MemoryRules.served(own.gpu_memory), own.network, self.machine)

    @property
    def _units(self) -> int:
        return units_at_start(self.fleet)

    def complete(self, placement: Placement, demands: Sequence[Demand], origin: str) -> Simulated:
        """A placement with its models.

        Raises:
            PlacesError: a unit has no room for its model.
        """
        try:
            return replace(simulated_of(placement, self.fleet, demands, self._around), origin=origin)
        except NoPlaceError as error:
            raise PlacesError(str(error)) from None

    def _planner(self, kind: str) -> Planner:
        search = self.search
        options = options_of(self.fleet, kind, search.seed)
        # As `muxserve plan` does it: there simulation chooses, and a plan that falls short is made again.
        tried = self.cluster is not None
        return Planner(
            file=self.file,
            fleet=self.fleet,
            latency=self.latency,
            options=options,
            seconds=search.seconds,
            simulate=None if tried else 0.0,
            told=lambda text: search.told(f"placing for {kind}: {text}"),
        )

    def _check(self, plan: ClusterPlan, kind: str) -> None:
        missing = plan.missing
        if missing and self.compares and plan.placement.units:
            names = enumerate_words(list(missing))
            self.notes.append(f"{kind} placement has no place for {names}: their requests fail in its modes")
        elif missing:
            why = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            raise PlacesError(f"not every model has a place with {kind} placement. {why}")

    def baselines(self, modes: Sequence[str]) -> str:
        """What is to be said of modes (kinds of placement by their names) that leave shapes aside; may be
        empty."""
        others = [m.name for m in self.fleet.models if m.has_own_unit]
        if _MUXSERVE in self.found:
            found = dict.fromkeys(m.name for unit in self.found[_MUXSERVE].others for m in unit.models)
            # What the plan has chosen by itself, the file does not say.
            others = [name for name in found if may_be_dedicated(self.fleet.model(name))]
        if not others or not modes:
            return ""
        serve = "serves" if len(modes) == 1 else "serve"
        models = f"{enumerate_words(list(modes))} {serve} {enumerate_words(others)}"
        return f"{models} without stages and without rolling prefill, whatever the fleet file says"


def places_of(
    file: Path,
    gpus: int | None,
    gpu_type: str | None,
    nodes: str | None,
    plan: Path | None,
    latency: LatencyModel,
    search: PlacementSearch | None = None,
) -> Places:
    """Read the fleet and what it is to run on: a plan file, the GPUs of the fleet file or of the command line, or the
    CPU of this machine.

    Raises:
        FleetError: the fleet or plan file is wrong.
        ClusterError: the GPUs given make no sense.
        CostError: the costs of a model are not known.
        PlacesError: as `Places.placed`.
    """
    fleet = load_fleet(file, serving=False)
    given = load_plan(plan, fleet) if plan is not None else None
    if given is not None:
        if gpus is not None or gpu_type is not None or nodes is not None:
            raise PlacesError("--plan says which GPUs there are; it does not go with --gpus, --gpu-type or --nodes")
        cluster = None if all(unit.device == CPU for unit in given.units) else given.cluster
        check_awake(fleet)
        fleet = arranged(fleet, plan or "", given.units)
        check_replicas(fleet, plan or "", given.units)
    else:
        cluster = cluster_of(fleet, gpus, gpu_type, nodes)
    demands = demands_of(fleet.all_awake(), file.parent, gpus=memory_of(cluster).items() if cluster else ())
    check_lengths(fleet, demands)
    places = Places(
        _words(fleet, cluster),
        fleet,
        file,
        demands,
        latency,
        cluster,
        _machine(fleet, cluster),
        search or PlacementSearch(),
    )
    if given is not None:
        places.found[_MUXSERVE] = _given(places, given, plan)
    return places


def _words(fleet: Fleet, cluster: Cluster | None) -> str:
    if cluster is None:
        cores = fleet.cluster.cores
        return f"{this_machine().cores if cores == AUTO else cores} cores of this machine"
    kinds = ", ".join(f"{n.count} {n.device}" for n in cluster.nodes[:4]) + (", ..." if len(cluster.nodes) > 4 else "")
    return f"{cluster.devices} GPUs ({kinds})"


def _machine(fleet: Fleet, cluster: Cluster | None) -> CpuPool | None:
    own = fleet.cluster
    return cpu_pool(this_machine(), own.cores, fleet.kv_pool.size, own.ranks) if cluster is None else None


def _given(places: Places, placement: Placement, plan: Path | None) -> Simulated:
    """The placement of a plan file; on a CPU with what `muxserve deploy` would make of it."""
    origin = f"placement of {plan}"
    if places.cluster is not None:
        return places.complete(placement, places.demands, origin)
    load_fleet(places.file)
    units = FleetPlanner(places.fleet, this_machine(), _no_gpus).at_start(plan)
    demands = [as_served(demand, units) for demand in places.demands]
    return places.complete(placement, demands, origin)


def _no_gpus() -> NoReturn:
    raise AssertionError("a plan for a CPU asks for no GPUs")
