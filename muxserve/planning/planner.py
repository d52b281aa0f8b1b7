"""A plan of a fleet on GPUs, for growing numbers of them, or on this machine's CPU; and its simulation. `muxserve plan`
prints it, `muxserve simulate` runs a workload on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from muxserve.cluster.machine import this_machine
from muxserve.config import Fleet, load_fleet
from muxserve.costs.latency import CostError, LatencyModel
from muxserve.costs.slower import Slower
from muxserve.planning.candidates.dedicated_units import divide_gpus, open_units
from muxserve.planning.candidates.device_pool import CpuPool, cpu_pool
from muxserve.planning.candidates.layouts import NoPlaceError
from muxserve.planning.candidates.mixed import alternatives, unit_ways
from muxserve.planning.candidates.resident_units import NoUnitError
from muxserve.planning.candidates.ways import MIXED, SIMPLEST, WAYS, as_way, planned_mode, share_rules, ways_of
from muxserve.planning.demand.demands import check_lengths, contexts_of, demands_of, equal_nodes, memory_of
from muxserve.planning.place.contest import LONG_LOOK, LOOK, Contest, Rival
from muxserve.planning.place.mixing import mixed
from muxserve.planning.place.prediction import (
    Prediction,
    ResidencyForecast,
    Simulated,
    Surroundings,
    Trial,
    falls_short,
    predict,
    predict_all,
    shares_per_lease,
    simulated_of,
    verified,
)
from muxserve.planning.place.simulations import Simulations
from muxserve.planning.place.sleeping import (
    SleepingForecast,
    SleepingPoint,
    all_awake,
    as_deployed,
    live_residency,
)
from muxserve.planning.place.this_machine import plan_this_machine, residency_here
from muxserve.planning.place.window import ANSWERS, usual_seconds
from muxserve.planning.place.workloads import DECLARED, WORKLOADS, Variation
from muxserve.planning.report.basis import costs_used
from muxserve.planning.report.document import SweepPoint
from muxserve.planning.report.sureness import Sureness, newly_short
from muxserve.planning.report.what_if import ScalePoint, most_met, with_rates
from muxserve.planning.specs.unit_demands import refused
from muxserve.planning.specs.unit_models import as_deployed as as_deployed_unit
from muxserve.simulator import SimulationError
from muxserve.workload import Workload, check_fits
from placement.cluster import Cluster
from placement.demand import Demand
from placement.format import format_size
from placement.improve import ImproveLimits
from placement.memory import MemoryRules
from placement.objective import OBJECTIVES, Objective
from placement.planner import MODES, ClusterPlan, ModeName, PlanOptions, plan_cluster

# For long enough that each model is active.
_GROUPS, _GROUPS_SECONDS = Variation("bursty groups", active=True), 120.0
# A longer window is for answers that take `_SPARE` times as long as those of the shorter one. One that proves too short
# is made longer up to `_LONGER` times.
_LONGER, _SPARE = 3, 1.25
# How long steps may take for an answer to hold is searched for in so many halvings of the error of their costs.
_HALVINGS = 2


# Places a fleet in a mode.
_Placed = Callable[[ModeName, tuple[Demand, ...]], ClusterPlan]
# Defaults of `muxserve plan`, by which `muxserve simulate` places as well.
SEARCH_SECONDS = 10.0
ATTAINMENT = 0.95
NO_SLEEPING = "--workload is for models that sleep: give the fleet `memory:` and one unit, or GPUs (--gpus)"


def options_of(
    fleet: Fleet,
    mode: str,
    seed: int = 0,
    objective: str = "auto",
    attainment: float = ATTAINMENT,
) -> PlanOptions:
    """The options of a plan for `fleet`.

    Raises:
        UsageError: there is no such objective or mode.
    """
    if objective == "auto":
        slo = any(m.slo.ttft_ms is not None or m.slo.tpot_ms is not None for m in fleet.models)
        objective = "slo" if slo else "throughput"
    known = next((name for name in OBJECTIVES if name == objective), None)
    if known is None:
        raise UsageError(f"--objective: must be auto, {', '.join(OBJECTIVES)}, not {objective!r}")
    placed = next((name for name in MODES if name == mode), None)
    if placed is None:
        raise UsageError(f"--mode: must be one of {', '.join(MODES)}, not {mode!r}")
    return PlanOptions(
        objective=Objective(known, attainment),
        mode=placed,
        rules=MemoryRules.served(fleet.cluster.gpu_memory),
        sharing=share_rules(fleet),
        local=ImproveLimits(seed=seed),
    )


class UsageError(ValueError):
    """The command line is wrong."""


@dataclass(slots=True)
class PlannedFleet:
    """What came of it. `simulated` is the simulation of the plan (`why_not`: why there is none), `spare` the factors by
    which rates were raised in planning, `rivals` the plans of the contest's final, the best first, and
    `contest_seconds` how long the contest took. `points` are those of a sweep over sizes, `scales` those of one over
    rates. `residency` (on a CPU) and `sleeping` (on GPUs) say what models that sleep would bring. `notes` say what
    became of models that leave their engines open, where the rivals do not; `sureness`, what becomes of the plan if
    steps take longer."""

    plan: ClusterPlan
    simulated: Prediction | None = None
    why_not: str = ""
    points: list[SweepPoint] = field(default_factory=list)
    spare: Mapping[str, float] = field(default_factory=dict)
    rivals: Sequence[Rival] = ()
    contest_seconds: float = 0.0
    residency: ResidencyForecast | None = None
    sleeping: SleepingForecast | None = None
    sureness: Sureness | None = None
    scales: list[ScalePoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans `fleet`, which `file` declares. `seconds` may be spent on the local search; `simulate` is how long the plan
    is simulated (None: as long as makes sense). `network` is bytes per second between machines (None: as the file
    says), `told` hears what goes on. Unless it is `robust`, plans are tried under the declared workload alone."""

    file: Path
    fleet: Fleet
    latency: LatencyModel
    options: PlanOptions
    seconds: float = SEARCH_SECONDS
    simulate: float | None = None
    network: float | None = None
    told: Callable[[str], None] = lambda text: None
    robust: bool = True
    _simulations: Simulations = field(init=False, repr=False, compare=False)
    _units: dict[object, Simulated] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_simulations", Simulations(self.latency))

    @property
    def seed(self) -> int:
        """The seed of the local search and of the simulations."""
        return self.options.local.seed

    def _surroundings(self, pool: CpuPool | None = None) -> Surroundings:
        network = self.fleet.cluster.network if self.network is None else self.network
        return Surroundings(self.options.rules, network, pool, self.options.sharing)

    def _demands(self, cluster: Cluster | None = None) -> list[Demand]:
        """What the models of the fleet ask for on a cluster (None: the CPU).

        Raises:
            FleetError: as `demands_of`, or requests do not fit into their model's context.
        """
        gpus = memory_of(cluster).items() if cluster is not None else ()
        # Plans are of models that are all awake; where memory decides, `as_deployed` sizes steps anew.
        demands = demands_of(self.fleet.all_awake(), self.file.parent, gpus=gpus)
        check_lengths(self.fleet, demands)
        return demands

    # ------------------------------------------------------------ GPUs

    def on_gpus(self, cluster: Cluster) -> PlannedFleet:
        """A plan for a cluster. Baselines know nothing but models of two engines."""
        return self._deployed(self._on_gpus(cluster))

    def _on_gpus(self, cluster: Cluster) -> PlannedFleet:
        demands = self._demands(cluster)
        made = self._place(demands, cluster)
        if not self._has_own_units:
            found = self._best(made, demands, cluster)
        else:
            divided = divide_gpus(self.fleet, demands, made, self._surroundings(), self.latency)
            shared = divided.divided.shared
            rest = None
            if shared and divided.left.devices:
                rest = self._best(self._place(shared, divided.left), shared, divided.left)
            found = rest or PlannedFleet(made)
            found.plan = divided.joined(rest.plan if rest else None, self.options.objective)
            simulated, found.why_not = self._simulated(found.plan)
            found.simulated = simulated and self._measured(found.plan, simulated)
        if self.options.mode == "muxserve" and not found.rivals:
            found.notes = [
                f"{name} has two engines: `engines: auto` is decided by simulation of several plans, and there was none"
                for name in open_units(found.plan, self.fleet)
            ]
        return found

    @property
    def _has_own_units(self) -> bool:
        """Whether replicas of some models have units to themselves. Baselines know no such models."""
        return self.options.mode == "muxserve" and any(model.has_own_unit for model in self.fleet.models)

    def _estimated(self, demands: Sequence[Demand], cluster: Cluster, seconds: float, before: str) -> ClusterPlan:
        """A plan of models that share GPUs in the fleet's own way, and of those whose file gives them units to
        themselves; nothing is simulated. `demands` are in the order of the fleet's models."""
        made = self._place(demands, cluster, seconds, before)
        if not self._has_own_units:
            return made
        divided = divide_gpus(self.fleet, demands, made, self._surroundings(), self.latency)
        shared, rest = divided.divided.shared, None
        if shared and divided.left.devices:
            rest = self._place(shared, divided.left, seconds, before)
        return divided.joined(rest, self.options.objective)

    def _tested(self, plan: ClusterPlan, demands: Sequence[Demand], cluster: Cluster) -> PlannedFleet:
        """The plan with its simulation; where no model has units to itself, with spare if it falls short."""
        if self._has_own_units:
            return PlannedFleet(plan, *self._simulated(plan))
        return self._borne_out(plan, demands, cluster)

    def swept(self, sizes: Sequence[int], cluster: Cluster, every: bool = False) -> PlannedFleet:
        """A plan for every size; of those that meet everything the first that its simulation bears out, else the last.
        Larger ones than that are not simulated, unless `every` one is to be borne out."""
        demands = self._demands(cluster)
        points: list[SweepPoint] = []
        found: PlannedFleet | None = None
        last: PlannedFleet | None = None
        each = max(0.5, self.seconds / len(sizes))
        for size in sizes:
            here = equal_nodes(size, cluster.nodes[0].device, self.fleet.cluster.gpus_per_node)
            plan = self._estimated(demands, here, each, f"{size} GPUs: ")
            if (found is not None and not every) or not plan.meets:
                points.append(SweepPoint(plan))
                last = None
                continue
            last = self._tested(plan, demands, here)
            if last.simulated is not None:
                last.simulated = self._measured(last.plan, last.simulated)
            points.append(SweepPoint(last.plan, last.simulated))
            if found is None and points[-1].enough:
                found = last
        if (found := found or last) is None:
            largest = points[-1].plan
            simulated, why_not = self._simulated(largest)
            found = PlannedFleet(largest, simulated and self._measured(largest, simulated), why_not)
        found.points = points
        return self._deployed(found)

    def scaled(self, scales: Sequence[float], cluster: Cluster) -> PlannedFleet:
        """A plan for each scale of the rates, on the same devices; the answer is that of the largest scale up to which
        all are met, or of the smallest one."""
        answer: PlannedFleet | None = None
        points: list[ScalePoint] = []
        for scale in scales:
            planner = replace(self, fleet=with_rates(self.fleet, scale))
            demands = planner._demands(cluster)
            plan = planner._estimated(demands, cluster, max(0.5, self.seconds / len(scales)), f"{scale:g}x: ")
            made = planner._tested(plan, demands, cluster) if plan.meets else PlannedFleet(plan)
            points.append(ScalePoint(scale, SweepPoint(made.plan, made.simulated)))
            if answer is None or most_met(points) == scale:
                answer = made
        assert answer is not None, "a sweep has a scale"
        if answer.simulated is None:
            answer.simulated, answer.why_not = self._simulated(answer.plan)
        answer.scales = points
        return self._deployed(answer)

    def _deployed(self, found: PlannedFleet) -> PlannedFleet:
        """The same with the units as they are served, and notes on what is refused."""
        placement, machine = found.plan.placement, this_machine()
        units = tuple(as_deployed_unit(self.fleet, unit) for unit in placement.units)
        found.plan = replace(found.plan, placement=replace(placement, units=units))
        demands = {demand.name: demand for demand in found.plan.demands}
        words = [each for unit in units for each in refused(self.fleet, unit, demands, machine)]
        size = self.fleet.kv_pool.size
        words += [
            f"`muxserve deploy` refuses kv_pool.size: {unit.name} has {format_size(unit.kv_bytes)} for it, and not "
            f"{format_size(size)}"
            for unit in placement.units
            if isinstance(size, int) and unit.kv_bytes < size
        ]
        found.notes = [*found.notes, *dict.fromkeys(words)]
        return found

    def how_sure(self, made: PlannedFleet, sizes: Sequence[int] = ()) -> Sureness | None:
        """What becomes of the plan, or of the sweep over `sizes`, if steps take longer than predicted by the error of
        the costs; None where that is not known, or nothing was simulated."""
        plan = made.plan
        doubt = costs_used(self.latency, plan.demands, plan.placement).doubtful
        if doubt is None or made.simulated is None:
            return None
        longer = doubt.error.median
        least = next((point.gpus for point in made.points if point.enough), None)
        if least is None:
            slower = replace(self, latency=Slower(self.latency, 1.0 + longer))
            simulated, _ = slower._simulated(plan, seconds=made.simulated.seconds)
            now = falls_short(plan, simulated) if simulated else []
            return Sureness(doubt, simulated, newly_short(falls_short(plan, made.simulated), now))
        cluster, by_name = plan.placement.cluster, {demand.name: demand for demand in plan.demands}
        demands = [by_name[model.name] for model in self.fleet.models]

        def enough(size: int, longer: float) -> bool:
            slower = replace(self, latency=Slower(self.latency, 1.0 + longer))
            here = equal_nodes(size, cluster.nodes[0].device, self.fleet.cluster.gpus_per_node)
            seconds, told = max(0.5, self.seconds / len(sizes)), f"{size} GPUs, steps {longer:.0%} longer: "
            first = slower._estimated(demands, here, seconds, told)
            last = slower._tested(first, demands, here) if first.meets else None
            return last is not None and SweepPoint(last.plan, last.simulated).enough

        if enough(least, longer):
            return Sureness(doubt, needed=least, slower=least, bears=longer)
        bears, too_long = 0.0, longer
        for _ in range(_HALVINGS):
            middle = (bears + too_long) / 2
            bears, too_long = (middle, too_long) if enough(least, middle) else (bears, middle)
        more = (size for size in sizes if size > least and enough(size, longer))
        return Sureness(doubt, needed=least, slower=next(more, None), bears=bears)

    def with_sleeping_models(self, made: PlannedFleet, workload: Workload) -> SleepingForecast:
        """What models that sleep would bring on the GPUs of a plan, or on each number of them of a sweep.

        Raises:
            SimulationError, CostError: as `simulate`.
            WorkloadError: no request to some model fits into its context.
        """
        check_fits(workload, contexts_of(made.plan.demands))
        requests = list(workload)
        points: list[SleepingPoint] = []
        for plan in [point.plan for point in made.points] or [made.plan]:
            cluster, demands = plan.placement.cluster, plan.demands

            def tell(way: str, done: int, total: int, gpus: int = cluster.devices) -> None:
                self.told(f"{gpus} GPUs, {way}: {done} of {total} requests")

            planned = simulated_of(plan.placement, self.fleet, demands, self._surroundings())
            awake = all_awake(planned, demands, requests, self._simulations, tell)
            asleep, why_not = None, ""
            try:
                served = as_deployed(self.fleet, demands, cluster, self._surroundings())
                asleep = live_residency(served, demands, requests, self.latency, tell)
            except NoUnitError as error:
                why_not = str(error)
            points.append(SleepingPoint(cluster.devices, awake, asleep, why_not))
        return SleepingForecast(workload.about, self.options.objective.attainment, tuple(points))

    def _place(
        self,
        demands: Sequence[Demand],
        cluster: Cluster,
        seconds: float | None = None,
        before: str = "",
        options: PlanOptions | None = None,
    ) -> ClusterPlan:
        until = time.monotonic() + (self.seconds if seconds is None else seconds)
        options = options or self.options
        found = plan_cluster(
            demands,
            cluster,
            self.latency,
            memory_of(cluster),
            replace(options, mode=planned_mode(self.fleet, options.mode)),
            lambda: time.monotonic() >= until,
            lambda text: self.told(before + text),
        )
        return replace(found, mode=options.mode)

    def _best(self, shared: ClusterPlan, demands: Sequence[Demand], cluster: Cluster) -> PlannedFleet:
        """The best of all ways to serve, by simulation; `shared`, with its spare, where there is no choice: nothing is
        simulated."""
        found: PlannedFleet | None = None
        if self.options.mode == "muxserve" and self.simulate != 0.0:

            @cache
            def placed(mode: ModeName, asked: tuple[Demand, ...]) -> ClusterPlan:
                options = replace(self.options, mode=mode)
                return self._place(asked, cluster, self.seconds / 4, f"{mode}: ", options)

            if self.options.objective.name == "throughput":
                return self._most_served(shared, placed)
            found = self._most_kept(shared, placed, demands, cluster)
        if found is None:
            found = self._borne_out(shared, demands, cluster)
            found.simulated = found.simulated and self._measured(found.plan, found.simulated)
        return found

    def _most_kept(
        self, shared: ClusterPlan, placed: _Placed, demands: Sequence[Demand], cluster: Cluster
    ) -> PlannedFleet | None:
        """The plan that keeps most requests within their objectives; None: nothing can be simulated.

        More plans compete where the first ones leave something to be gained: those of the final with spare for models
        that fall short in simulation, other layouts of models, and the best plan with units that are served in
        different ways."""
        began = time.monotonic()
        seconds = usual_seconds(shared) if self.simulate is None else self.simulate
        # Where queues grow a small part of a window shows little.
        contest = self._contest(shared.demands, seconds, LOOK if shared.meets else LONG_LOOK)
        found = PlannedFleet(shared)
        ranked = contest.ranked(self._rivals(found, placed), SIMPLEST)
        if ranked[0].prediction is None:
            return None
        if not ranked[0].keeps_all or self.options.objective.name == "gpus":
            found = self._borne_out(shared, demands, cluster)
            ranked = contest.ranked(self._rivals(found, placed, every=True), SIMPLEST)
            for way, spared in self._with_spare(ranked, placed, demands, cluster):
                ranked = contest.joined(ranked, Rival(way, spared.plan))
                found = spared if ranked[0].plan is spared.plan else found
            ranked = self._with_mixed(ranked, contest)
        return self._won(found, ranked, began)

    def _with_spare(
        self, ranked: Sequence[Rival], placed: _Placed, demands: Sequence[Demand], cluster: Cluster
    ) -> Iterator[tuple[str, PlannedFleet]]:
        """Plans of the final that fall short, by their way, with spare for the models that do. Where models share GPUs
        in the fleet's own way they have it already."""
        tried: set[ModeName] = {"muxserve", "even"}
        for rival in ranked:
            way, how = rival.way, WAYS[rival.way]
            if how.mode in tried or how.layout is not None or not rival.short:
                continue
            tried.add(how.mode)

            def again(asked: Sequence[Demand], way: str = way, mode: ModeName = how.mode) -> ClusterPlan:
                return as_way(way, placed(mode, tuple(asked)), self.fleet, self._surroundings(), self.latency)

            spared = self._borne_out(rival.plan, demands, cluster, again)
            if spared.plan is not rival.plan:
                yield way, spared

    def _most_served(self, shared: ClusterPlan, placed: _Placed) -> PlannedFleet:
        """The plan that serves most requests per second, which a part of a window does not show; `shared` where its
        simulation is too short for that."""
        simulated, why_not = self._simulated(shared)
        simulated = simulated and self._measured(shared, simulated, alike=True)
        found = PlannedFleet(shared, simulated, why_not)
        if simulated is None or not simulated.is_long_enough:
            return found
        began = time.monotonic()
        short = not shared.meets or bool(falls_short(shared, simulated))
        rivals = self._rivals(found, placed, every=short)
        # All models of all plans are simulated for several answers of so many seconds, or their rates say nothing.
        longer = max((window.seconds for window in simulated.windows.values()), default=0.0) / ANSWERS
        for _ in range(1 + _LONGER):
            answers = longer
            contest = self._contest(shared.demands, simulated.seconds, 1.0, answers)
            ranked = contest.ranked(rivals, SIMPLEST)
            # Answers of one way take longer than those of another.
            longest = (each.prediction.longest_answer or 0.0 for each in ranked if each.prediction)
            longer = _SPARE * max(longest, default=0.0)
            if self.simulate is not None or longer <= answers or all(each.is_measured for each in ranked):
                break
            rivals = [replace(each, prediction=None) for each in rivals]
        return self._won(found, ranked, began)

    def _won(self, found: PlannedFleet, ranked: list[Rival], began: float) -> PlannedFleet:
        """What comes of a contest that began then; `found` is the plan of models that share GPUs."""
        first = ranked[0]
        if first.plan is not found.plan:
            found = PlannedFleet(first.plan)
        found.simulated = first.prediction and self._measured(first.plan, first.prediction)
        found.rivals, found.contest_seconds = ranked, time.monotonic() - began
        return found

    def _contest(self, demands: Sequence[Demand], seconds: float, part: float, answers: float | None = None) -> Contest:
        """A contest in which plans are tried for so many seconds, and looked at for a part of these. With `answers`,
        the declared workload lasts for several answers of so many seconds."""
        names = [demand.name for demand in demands]
        # A model alone has nobody to take turns with.
        others = [each for each in WORKLOADS if len(names) > 1 or not each.turns]
        known: dict[object, Prediction | None] = {}

        def trial(part: float, varied: Variation) -> Trial:
            # What differs from what is declared is only compared, which takes less.
            longest = dict.fromkeys(names, answers) if answers is not None and varied is DECLARED else None
            return Trial(part * varied.span * seconds, self.seed, varied, longest=longest)

        def simulate(plan: ClusterPlan, part: float, varied: Variation) -> Prediction | None:
            key = (plan.placement, part, varied)
            if key not in known:
                known[key] = self._tried(plan, trial(part, varied))[0]
            return known[key]

        def ahead(plans: Sequence[ClusterPlan], part: float, varied: Variation) -> None:
            missing = {key: plan for plan in plans if (key := (plan.placement, part, varied)) not in known}
            found = self._tried_together([*missing.values()], trial(part, varied))
            if found is not None:
                known.update(zip(missing, found, strict=True))

        return Contest(simulate, others if self.robust else [DECLARED], part, ahead)

    def _with_mixed(self, ranked: Sequence[Rival], contest: Contest) -> list[Rival]:
        """The plans of the final, and the first of them with each of its units served as it is best."""
        first = ranked[0].plan
        ways = unit_ways(self.fleet, shares_per_lease(self.fleet, first.placement))
        others = partial(alternatives, first, ways, self._surroundings(), self.latency)
        plan = mixed(first, others, contest)
        return list(ranked) if plan is None else contest.joined(ranked, Rival(MIXED, plan))

    def _rivals(self, found: PlannedFleet, placed: _Placed, every: bool = False) -> list[Rival]:
        """The plan that was found, first, and those of other ways to serve that differ from each other: of `every` one,
        or of those that take little time."""
        own, *others = ways_of(self.fleet, every, shares_per_lease(self.fleet, found.plan.placement))
        rivals = [Rival(own, found.plan, found.simulated)]
        for way in others:
            mode = WAYS[way].mode
            planned = found.plan if mode == WAYS[own].mode else placed(mode, found.plan.demands)
            plan = as_way(way, planned, self.fleet, self._surroundings(), self.latency)
            for number, rival in enumerate(rivals):
                if rival.plan.placement.units == plan.placement.units:
                    rivals[number] = replace(rival, alike=(*rival.alike, way))
                    break
            else:
                rivals.append(Rival(way, plan))
        return rivals

    def _borne_out(
        self,
        first: ClusterPlan,
        demands: Sequence[Demand],
        cluster: Cluster,
        again: Callable[[Sequence[Demand]], ClusterPlan] | None = None,
    ) -> PlannedFleet:
        """The plan, or one with spare for models that fall short in its simulation, made `again` (None: as the options
        say)."""
        simulated, why_not = self._simulated(first)
        if simulated is None or self.options.objective.name == "throughput":
            return PlannedFleet(first, simulated, why_not)

        known, seconds = {id(first): simulated}, simulated.seconds

        def plan(asked: Sequence[Demand]) -> ClusterPlan:
            if asked is demands:
                return first
            return again(asked) if again is not None else self._place(asked, cluster, before="again: ")

        def simulate(made: ClusterPlan) -> Prediction:
            prediction = known.get(id(made)) or self._simulated(made, seconds=seconds)[0]
            assert prediction is not None, "what could be simulated once can be simulated again"
            return prediction

        best = verified(demands, plan, simulate)
        return PlannedFleet(best.plan, best.prediction, spare=best.spare)

    # ------------------------------------------------------------ CPU

    def on_cpu(self, workload: Workload | None = None) -> PlannedFleet:
        """A plan for this machine. Where memory decides which models are awake, what that costs is simulated on the
        workload (None: bursty groups at the models' rates).

        Raises:
            UsageError: the models do not fit, or there is a workload although no model sleeps.
        """

        resolved, own = load_fleet(self.file), self.fleet.cluster
        demands = self._demands()
        pool = cpu_pool(this_machine(), own.cores, self.fleet.kv_pool.size, own.ranks)
        try:
            made = plan_this_machine(resolved, demands, pool, self.latency, self.options.objective)
        except ValueError as error:
            raise UsageError(str(error)) from None
        check_lengths(self.fleet, made.demands)
        simulated, why_not = self._simulated(made, pool)
        simulated = simulated and self._measured(made, simulated, pool)
        notes = [
            f"`engines: auto` of {name} is {unit.shape_of(name)} on a CPU"
            for name, unit in open_units(made, self.fleet).items()
        ]
        forecast = None if simulated is None else self._residency(resolved, made, pool, workload)
        if workload is not None and forecast is None:
            raise UsageError(NO_SLEEPING)
        return PlannedFleet(made, simulated, why_not, residency=forecast, notes=notes)

    def _residency(
        self, resolved: Fleet, made: ClusterPlan, pool: CpuPool, workload: Workload | None
    ) -> ResidencyForecast | None:
        """What sleeping costs, where memory decides which models are awake in one unit; None elsewhere."""
        spec = residency_here(resolved, made.placement)
        if not any(each.models for each in spec.values()):
            return None  # nobody sleeps
        if workload is not None:
            check_fits(workload, contexts_of(made.demands))
        requests = None if workload is None else list(workload)
        about = _GROUPS.name if workload is None else workload.about
        seconds = requests[-1].arrival if requests else _GROUPS_SECONDS
        self.told(f"simulating {about}")
        units = simulated_of(made.placement, self.fleet, made.demands, self._surroundings(pool))
        resident, awake = (
            predict(made, self.latency, Trial(seconds, self.seed, _GROUPS, requests), each)
            for each in (replace(units, residency=spec), units)
        )
        (only,) = spec.values()
        every = only.rules.always + sum(costs.bytes for costs in only.models.values())
        return ResidencyForecast(about, resident, awake, only.rules.limit, every)

    # ------------------------------------------------------------ simulation

    def _simulated(
        self, made: ClusterPlan, pool: CpuPool | None = None, seconds: float | None = None
    ) -> tuple[Prediction | None, str]:
        """The simulation of the plan under the declared workload, or why there is none; arguments as of `_tried`, and
        `seconds` (None: as long as the options say, or as is usual)."""
        asked = self.simulate if seconds is None else seconds
        if not made.placement.units:
            return None, ""
        return self._tried(made, Trial(usual_seconds(made) if asked is None else asked, self.seed), pool)

    def _tried(self, made: ClusterPlan, trial: Trial, pool: CpuPool | None = None) -> tuple[Prediction | None, str]:
        """What the plan does under a trial, or why that cannot be simulated. `pool` is the machine whose CPU it is
        for."""
        if trial.seconds <= 0.0:
            return None, ""
        self.told("simulating")

        def count(done: int, total: int) -> None:
            self.told(f"simulating, {done} of {total} requests")

        try:
            units = self._simulated_units(made, pool)
            return predict(made, self.latency, trial, units, count, self._simulations), ""
        except (SimulationError, CostError, NoPlaceError) as error:
            return None, str(error)

    def _tried_together(self, plans: Sequence[ClusterPlan], trial: Trial) -> Sequence[Prediction] | None:
        """What several plans on GPUs do under a trial; None: one is tried as fast alone, or one cannot be simulated."""
        if len(plans) < 2 or trial.seconds <= 0.0:
            return None

        def count(done: int, total: int) -> None:
            self.told(f"simulating {len(plans)} plans, {done} of {total} requests")

        try:
            units = [(plan, self._simulated_units(plan, None)) for plan in plans]
            return predict_all(units, trial, self._simulations, count)
        except (SimulationError, CostError, NoPlaceError):
            # `_tried` says which, and why.
            return None

    def _simulated_units(self, made: ClusterPlan, pool: CpuPool | None) -> Simulated:
        """The units of a plan; the same ones each time, so that what was simulated of them is known."""
        key = (made.placement, tuple(made.demands), pool)
        known = self._units.get(key)
        if known is None:
            around = self._surroundings(pool)
            known = self._units[key] = simulated_of(made.placement, self.fleet, made.demands, around)
        return known

    def _measured(
        self, made: ClusterPlan, simulated: Prediction, pool: CpuPool | None = None, alike: bool = False
    ) -> Prediction:
        """The plan simulated for as long as shows how many requests it serves per second, unless the options say for
        how long. Models whose answers end soon are simulated for less time than others, unless they are `alike`."""
        usual = simulated.seconds
        for _ in range(_LONGER):
            if self.simulate is not None or simulated.is_long_enough:
                break
            longest = {name: _SPARE * (window.longest or 0.0) for name, window in simulated.windows.items()}
            if alike:
                longest = dict.fromkeys(longest, max(longest.values()))
            longer, _ = self._tried(made, Trial(usual, self.seed, longest=longest), pool)
            if longer is None or _spans(longer) == _spans(simulated):
                break
            simulated = longer
        return simulated


def _spans(simulated: Prediction) -> dict[str, float]:
    """Seconds of load that were simulated of each model."""
    return {name: window.seconds for name, window in simulated.windows.items()}
