"""What a placement will deliver: a simulation of it under generated load, with all that works together in it; and
plans that their own simulation bears out.

The estimator works with means, and is optimistic close to what the devices can do. Where the simulation of a plan
misses objectives that the plan says are met, `verified` plans the models that miss them once more as if they were asked
for more often, until the simulation of the true rates agrees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from muxserve.config import Fleet
from muxserve.costs.contention import Sharing
from muxserve.costs.devices import device
from muxserve.costs.latency import EngineShape, LatencyModel, target_load
from muxserve.costs.measured import overheads_on
from muxserve.costs.roofline import Roofline
from muxserve.metrics.definitions import Objectives
from muxserve.metrics.records import RequestRecord
from muxserve.metrics.summary import Summary, summarise
from muxserve.planning.candidates.device_pool import CPU, GpuPool, Surroundings
from muxserve.planning.candidates.layouts import (
    LayoutRequest,
    NoPlaceError,
    ReplicaLayout,
    SimulatedLayout,
    replica_unit,
    ring_of,
    wanted_of,
)
from muxserve.planning.candidates.resident_units import TTFT_SECONDS
from muxserve.planning.place.simulations import Asked, Simulations
from muxserve.planning.place.window import ANSWERS, RateWindow, longer_seconds, longest_of, longest_tokens
from muxserve.planning.place.workloads import DECLARED, Variation, loads_of
from muxserve.planning.specs.residency import with_residency
from muxserve.planning.specs.unit_models import as_deployed, as_unit_has
from muxserve.planning.specs.unit_specs import levels_of, migration_of, scaling_of
from muxserve.replicas.prefixes import dispatch_policy
from muxserve.replicas.priorities import Levels
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.scaling import RollingScalingRules as RollingScaling
from muxserve.simulator import (
    MigrationCosts,
    Mode,
    Options,
    ReplicaRules,
    ResidencyResult,
    RingRules,
    Rules,
    SimUnit,
    adapt,
    coupled,
    mode_of,
    sim_unit,
    simulate,
)
from muxserve.spec import ResidencySpec
from muxserve.spec.unit import SHARE_STEPS
from muxserve.workload import ModelLoad, generate
from muxserve.workload.trace import TraceRequest
from placement.cluster import PlacedUnit, Placement
from placement.demand import Demand
from placement.planner import ClusterPlan

# Rolling replicas that prefill for less of their time than this are one too many, as for the live global scheduler.
_IDLE = 0.1
SPARE = 1.25  # a model that falls short is planned for with so much more of its rate, each time
ATTEMPTS = 4
# A rate of fewer requests is not told.
_FEWEST_ENDED = 10


@dataclass(frozen=True, slots=True)
class Simulated:
    """What is simulated of a fleet: a placement, the models that its units of two engines serve, the units of models of
    one engine (`others`), and by what replicas of a model work together, by its name. `spares` are units that
    it may get beside those that it has, before a mode has changed them. `residency`, by unit, if memory decides which
    of its models are awake. `origin` says where the placement comes from, for the user; `elastic` names the
    units whose engines can change their share from lease to lease, `sharing` is as of `SimUnit`."""

    placement: Placement
    models: Mapping[str, Demand]
    others: tuple[SimUnit, ...] = ()
    rules: Mapping[str, ReplicaRules | RingRules] = field(default_factory=dict)
    spares: Mapping[str, tuple[SimUnit, ...]] = field(default_factory=dict)
    residency: Mapping[str, ResidencySpec] = field(default_factory=dict)
    origin: str = ""
    elastic: frozenset[str] = frozenset()
    sharing: Sharing = "mps"

    @property
    def about(self) -> str:
        """Where the placement comes from, and what it is."""
        units = "; ".join(
            f"{unit.name} ({len(unit.devices)} x {unit.device}): {', '.join(member.model for member in unit.models)}"
            for unit in self.placement.units
        )
        return f"{self.origin}: {units}"

    @property
    def longest(self) -> dict[str, int]:
        """Tokens of the longest sequence of each model of one engine."""
        return {m.name: m.max_len for unit in self.others for m in unit.models if m.max_len is not None}

    def units(self, mode: Mode) -> list[SimUnit]:
        """All units. What a mode takes away is taken from models of two engines.

        Raises:
            SimulationError: as `sim_unit`.
        """
        apart = {unit.name for unit in self.others}
        shared = [unit for unit in self.placement.units if unit.name not in apart]
        units = [adapt(sim_unit(unit, self.models, _steps(unit.name in self.elastic)), mode) for unit in shared]
        if self.residency and mode.placement == "muxserve":
            units = [with_residency(unit, self.residency[unit.name]) for unit in units]
        return [replace(unit, sharing=self.sharing) for unit in (*units, *self.others)]

    def rules_of(self, mode: Mode) -> Rules:
        """By what replicas work together in that mode."""
        found: dict[str, ReplicaRules | RingRules] = {}
        for name, each in self.rules.items():
            spares = self.spares.get(name, ())
            found[name] = replace(each, spares=tuple(u if u.one_engine else adapt(u, mode) for u in spares))
        return found


def simulated_of(placement: Placement, fleet: Fleet, demands: Sequence[Demand], around: Surroundings) -> Simulated:
    """A placement of the fleet's models, of which `demands` are.

    Raises:
        NoPlaceError: a unit has no room for its model.
    """
    by_model: dict[str, list[PlacedUnit]] = {}
    for unit in placement.units:
        for placed in unit.models:
            by_model.setdefault(placed.model, []).append(unit)
    by_name = {demand.name: demand for demand in demands}
    models = {demand.name: replace(demand, max_len=demand.context) for demand in demands}
    placement = replace(placement, units=tuple(_under(unit, fleet) for unit in placement.units))
    scaling, free = scaling_of(fleet), _Free(placement)
    own_units = {unit.name for unit in placement.units if _runs_otherwise(unit, fleet)}
    others: list[SimUnit] = []
    rules: dict[str, ReplicaRules | RingRules] = {}
    spares: dict[str, tuple[SimUnit, ...]] = {}
    for name, mine in by_model.items():
        first = mine[0]
        more = free.take(first, scaling[name].maximum - len(mine)) if name in scaling else []
        levels = _levels(fleet, first, by_name[name])
        if first.name not in own_units:
            if len(mine) > 1 or name in scaling:
                rules[name] = _replica_rules(fleet, levels, scaling.get(name), around)
            only = tuple(placed for placed in first.models if placed.model == name)
            alone = replace(first, models=only)
            spares[name] = tuple(
                sim_unit(
                    replace(alone, name=f"{name}+{number}", devices=devices),
                    models,
                    _steps(_is_elastic(fleet, alone)),
                )
                for number, devices in enumerate(more, 1)
            )
            continue
        wanted = wanted_of(as_unit_has(fleet.model(name), first), by_name[name], free=False)
        places = [_place(placement, unit, len(mine), wanted, around) for unit in mine]
        made = [replica_unit(wanted, place, unit.name, unit.devices) for place, unit in zip(places, mine, strict=True)]
        others += made
        spares[name] = tuple(
            replace(made[0], name=f"{name}+{number}", devices=devices) for number, devices in enumerate(more, 1)
        )
        if wanted.rolling:
            rules[name] = _with_scaling(ring_of(wanted), fleet, levels, scaling.get(name), around)
        elif len(mine) > 1 or name in scaling:
            rules[name] = _replica_rules(fleet, levels, scaling.get(name), around)
    sharing: Sharing = "time_slices" if fleet.cluster.mps == "off" else "mps"
    elastic = frozenset(unit.name for unit in placement.units if _is_elastic(fleet, unit))
    return Simulated(placement, models, tuple(others), rules, spares, elastic=elastic, sharing=sharing)


def shares_per_lease(fleet: Fleet, placement: Placement) -> bool:
    """Whether engines of a placement can change their share of the SMs from one lease to the next."""
    return any(_is_elastic(fleet, unit) for unit in placement.units)


def _is_elastic(fleet: Fleet, unit: PlacedUnit) -> bool:
    """Whether that holds for the engines of a unit: those that have a part of one GPU can, in green contexts."""
    is_on_one_gpu = unit.device != CPU and len(unit.devices) == 1
    return fleet.cluster.has_shares_per_lease and is_on_one_gpu and unit.has_shares


def _steps(is_elastic: bool) -> int:
    """The number of shares that a lease can give an engine; 0: that of its start for good."""
    return SHARE_STEPS if is_elastic else 0


def _runs_otherwise(unit: PlacedUnit, fleet: Fleet) -> bool:
    """Whether the steps of the only engine of a unit are others than vLLM's own on GPUs: it is a pipeline, or prefill
    rolls over it."""
    if unit.split or len(unit.models) > 1:
        return False
    return unit.device == CPU or unit.stages > 1 or unit.rolls


def _under(unit: PlacedUnit, fleet: Fleet) -> PlacedUnit:
    """The unit under the policy that it will be served under, with the shares that its engines will have."""
    unit = as_deployed(fleet, unit)
    return unit if unit.policy or unit.alone else replace(unit, policy=fleet.policy)


class _Free:
    """Devices of a placement that no unit has."""

    def __init__(self, placement: Placement) -> None:
        taken = {number for unit in placement.units for number in unit.devices}
        kinds = [node.device for node in placement.cluster.nodes for _ in range(node.count)]
        self._left = [(number, kind) for number, kind in enumerate(kinds) if number not in taken]

    def take(self, like: PlacedUnit, count: int) -> list[tuple[int, ...]]:
        """Devices for so many more such units, as far as there are any. Those of a CPU share it."""
        if like.device == CPU:
            return [like.devices] * max(0, count)
        found = []
        for _ in range(count):
            mine = [number for number, kind in self._left if kind == like.device][: len(like.devices)]
            if len(mine) < len(like.devices):
                break
            self._left = [each for each in self._left if each[0] not in mine]
            found.append(tuple(mine))
        return found


def _levels(fleet: Fleet, unit: PlacedUnit, demand: Demand) -> Levels:
    tp = 1 if unit.device == CPU else len(unit.devices) // unit.stages
    costs = Roofline().engine(demand.architecture, EngineShape(unit.device, tp, 1.0, demand.dtype, demand.graphs))
    return Levels(levels_of(fleet), auto=target_load(costs))


def _copying(fleet: Fleet, around: Surroundings) -> MigrationCosts:
    limit = fleet.migration.bandwidth if fleet.migration is not None else None
    return MigrationCosts(bandwidth=min(around.network, limit or around.network))


def _replica_rules(fleet: Fleet, levels: Levels, scaling: ScalingRules | None, around: Surroundings) -> ReplicaRules:
    return ReplicaRules(
        dispatch=partial(dispatch_policy, fleet.dispatch),
        migration=migration_of(fleet),
        scaling=scaling,
        levels=levels,
        copying=_copying(fleet, around),
    )


def _with_scaling(
    rules: RingRules, fleet: Fleet, levels: Levels, scaling: ScalingRules | None, around: Surroundings
) -> RingRules:
    rolling = None
    if scaling is not None:
        least, most = max(1, scaling.minimum), scaling.maximum
        rolling = RollingScaling(patience=scaling.hold, idle=_IDLE, least=least, most=most)
    return replace(
        rules,
        scaling=rolling,
        migration=migration_of(fleet),
        levels=levels,
        copying=_copying(fleet, around),
    )


def _place(
    placement: Placement, unit: PlacedUnit, replicas: int, wanted: LayoutRequest, around: Surroundings
) -> SimulatedLayout:
    """That unit in detail, with the page pool that the placement gives it."""
    name = wanted.demand.name
    if unit.device == CPU:
        assert around.machine is not None, "units on a CPU are on some machine"
        machine = replace(around.machine, pool=unit.kv_bytes, others=len(placement.units) - replicas)
        try:
            return machine.place(wanted, ReplicaLayout(replicas, unit.stages, machine.ranks, unit.rolls))
        except NoPlaceError as error:
            raise NoPlaceError(f"{name}: {error}") from None
    tp = len(unit.devices) // unit.stages
    pool = GpuPool(unit.device, (len(unit.devices),), device(unit.device).memory_bytes, around.rules)
    try:
        place = pool.place(wanted, ReplicaLayout(replicas, unit.stages, tp, unit.rolls))
    except NoPlaceError as error:
        raise NoPlaceError(f"{name}: {error}") from None
    blocks = tuple(max(1, count * unit.kv_bytes // place.kv_bytes) for count in place.blocks)
    return replace(place, blocks=blocks, kv_bytes=unit.kv_bytes)


# ---------------------------------------------------------------- prediction


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulation of `seconds` of load, and for some models of more: `windows` has what it shows of each one's
    requests per second. The summary is of the requests that came within `seconds`, so that all models are in it by
    their rates."""

    summary: Summary
    seconds: float
    windows: Mapping[str, RateWindow]
    # Where memory decides which models are awake.
    residency: ResidencyResult | None = None
    # Of models without objectives: requests that are answered, with a first token within `TTFT_SECONDS`.
    in_time: Mapping[str, int] = field(default_factory=dict)

    def kept(self, model: str) -> int:
        """Requests of a model that are answered within its objectives, or in time where it has none."""
        figures = self.summary.models.get(model)
        if figures is None:
            return 0
        met = figures.slo.get("all")
        return self.in_time.get(model, figures.completed) if met is None else round(met * figures.requests)

    @property
    def is_long_enough(self) -> bool:
        """It holds several of the longest answers of each model, so that it shows how many requests are served per
        second."""
        return bool(self.windows) and all(window.is_long_enough for window in self.windows.values())

    @property
    def longest_answer(self) -> float | None:
        """Seconds that the longest answers of any model took; None: there was none."""
        return longest_of([window.longest for window in self.windows.values()])

    @property
    def rate(self) -> float:
        """Requests per second that ended in the second half, however short that was. Neither the empty fleet at the
        start nor the last, longest answers count."""
        return sum(window.rate for window in self.windows.values())

    @property
    def throughput(self) -> float | None:
        """Requests per second that all models completed in the second half; None: the simulation was too short."""
        return self.rate if self.is_long_enough else None

    def sustained(self, model: str) -> float | None:
        """Requests per second that a model completed in the second half; None if that is not measured, since too few
        ended there, or the simulation was too short."""
        window = self.windows.get(model)
        if window is None or window.finished < _FEWEST_ENDED or not window.is_long_enough:
            return None
        return window.rate

    @property
    def grows(self) -> bool:
        """Some model's queue grows."""
        return any(map(self.unbounded, self.windows))

    def unbounded(self, model: str) -> bool:
        """Some requests of a model still waited when no more had come for as long as the load took: its queue grows."""
        return model in self.windows and self.windows[model].waiting > 0


@dataclass(frozen=True, slots=True)
class ResidencyForecast:
    """A fleet with `memory` under a workload, called `about`: as it is served, and with all models `awake`, for which
    `awake_bytes` would be needed; its `limit` is what the fleet may take, headroom apart."""

    about: str
    resident: Prediction
    awake: Prediction
    limit: int
    awake_bytes: int


def falls_short(plan: ClusterPlan, simulated: Prediction) -> list[str]:
    """Models that in simulation meet their objectives less often than the plan's objective asks, or are answered in
    time less often where they have none. A plan for throughput promises the latter to nobody."""
    names = [demand.name for demand in plan.demands if demand.name in simulated.summary.models]
    if plan.objective.name == "throughput":
        names = [name for name in names if simulated.summary.models[name].slo]
    return [name for name in names if _kept_part(simulated, name) < plan.objective.attainment]


def _kept_part(simulated: Prediction, name: str) -> float:
    """The part of a model's requests that are kept; 1 without any."""
    requests = simulated.summary.models[name].requests
    return simulated.kept(name) / requests if requests else 1.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What a plan is tried under: `seconds` of generated load that differs from the declared one as `varied` says, or
    `requests` of so many seconds. Units of models whose longest answers take long (`longest`, in seconds) are simulated
    until several of these fit."""

    seconds: float
    seed: int = 0
    varied: Variation = DECLARED
    requests: Sequence[TraceRequest] | None = None
    longest: Mapping[str, float] | None = None


def predict(
    plan: ClusterPlan,
    latency: LatencyModel,
    trial: Trial,
    simulated: Simulated | None = None,
    progress: Callable[[int, int], None] | None = None,
    simulations: Simulations | None = None,
) -> Prediction:
    """Simulate what a trial brings on the plan's placement, with log-normal lengths of the demands' means, and sum up.

    Args:
        simulated: what `simulated_of` makes of the placement, where it has other units than those of two engines, or
            replicas work together by rules of the fleet's.
        simulations: those that plans which are compared have in common.

    Raises:
        SimulationError: a unit cannot run.
        CostError: the latency model does not know a model.
    """
    simulated = simulated or Simulated(plan.placement, {})
    run = _run_of(plan, trial, simulated)
    if not simulated.residency:
        records = (simulations or Simulations(latency)).records(*run.asked[:3], progress, run.asked.until)
        return run.summed_up(records)
    units, workload, rules, _ = run.asked
    options = Options(overheads_on(latency, units[0].device))
    result = simulate(units, workload, latency, options, rules, progress=progress)
    return run.summed_up(result.records, next((u.residency for u in result.units if u.residency is not None), None))


def predict_all(
    plans: Sequence[tuple[ClusterPlan, Simulated]],
    trial: Trial,
    simulations: Simulations,
    progress: Callable[[int, int], None] | None = None,
) -> list[Prediction]:
    """What a trial brings on several plans, whose simulations share the processes; otherwise as `predict`. All models
    of these plans are awake."""
    runs = [_run_of(plan, trial, simulated) for plan, simulated in plans]
    found = simulations.records_of([run.asked for run in runs], progress)
    return [run.summed_up(records) for run, records in zip(runs, found, strict=True)]


@dataclass(frozen=True, slots=True)
class _Run:
    """One simulation of a plan under a trial: what is `asked` for, what comes for each model (`loads`), and for how
    many seconds (`spans`). Models that depend on each other are `together`."""

    plan: ClusterPlan
    trial: Trial
    asked: Asked
    loads: Mapping[str, ModelLoad]
    spans: Mapping[str, float]
    together: Sequence[Sequence[str]]

    def summed_up(self, records: Sequence[RequestRecord], residency: ResidencyResult | None = None) -> Prediction:
        """What became of the requests."""
        demands, spans, seconds = self.plan.demands, self.spans, self.trial.seconds
        counted = records
        if self.trial.requests is None:
            seconds = min(spans.values(), default=seconds)
            counted = [record for record in records if record.arrival < seconds]
        summary = summarise(
            counted,
            rates={d.name: d.rate for d in demands},
            objectives={d.name: Objectives(d.slo_ttft, d.slo_tpot) for d in demands},
        )
        open_ended = {d.name for d in demands if d.slo_ttft is d.slo_tpot is None}
        in_time = Counter(dict.fromkeys(open_ended, 0))
        in_time.update(r.model for r in counted if r.model in open_ended and r.ok and (r.ttft or 0.0) <= TTFT_SECONDS)
        ended = Counter(
            r.model
            for r in records
            if r.ok and r.finish is not None and spans[r.model] / 2 <= r.finish < spans[r.model]
        )
        waiting = Counter(r.model for r in records if r.finish is None and not r.error)
        windows: dict[str, RateWindow] = {}
        for names in self.together:
            answers = longest_of([_longest_answer(summary, name, self.loads[name]) for name in names])
            windows |= {name: RateWindow(spans[name], ended[name], answers, waiting[name]) for name in names}
        return Prediction(summary, seconds, windows, residency, in_time)


def _run_of(plan: ClusterPlan, trial: Trial, simulated: Simulated) -> _Run:
    demands, sequences = plan.demands, longest_sequences(plan, simulated)
    seconds, requests, longest = trial.seconds, trial.requests, trial.longest
    loads = loads_of(demands, sequences, seconds, trial.varied)
    known = simulated.models
    models = {d.name: replace(known.get(d.name) or d, max_len=sequences[d.name]) for d in demands}
    simulated = replace(simulated, models=models)
    how = mode_of(plan.mode)
    units, rules = simulated.units(how), simulated.rules_of(how)
    together = _together(units, loads)
    spans = dict.fromkeys(loads, seconds)
    if longest is not None and requests is None:
        for names in together:
            most = max(longest.get(name, 0.0) for name in names)
            spans |= dict.fromkeys(names, longer_seconds(seconds, most, sum(loads[name].rate for name in names)))
    workload = _requests(loads, spans, trial.seed) if requests is None else list(requests)
    # Who waits longer than that waits in a queue that grows. Playing it to its end would take hours of its time.
    expected = _expected_answers(plan, loads)
    until = {name: span + max(span, ANSWERS * expected.get(name, 0.0)) for name, span in spans.items()}
    return _Run(plan, trial, Asked(units, workload, rules, until), loads, spans, together)


def _together(units: Sequence[SimUnit], loads: Mapping[str, ModelLoad]) -> list[list[str]]:
    """The models, divided into those whose units depend on each other."""
    groups = [{model.name for unit in group for model in unit.models} for group in coupled(units)]
    placed = [[name for name in loads if name in names] for names in groups]
    return [*placed, *([name] for name in loads if all(name not in names for names in groups))]


def _requests(loads: Mapping[str, ModelLoad], spans: Mapping[str, float], seed: int) -> list[TraceRequest]:
    """The requests of each model within its span of seconds, in order of arrival."""
    whole = generate(loads, max(spans.values(), default=0.0), seed)
    return [request for request in whole if request.arrival < spans[request.model]]


def _expected_answers(plan: ClusterPlan, loads: Mapping[str, ModelLoad]) -> dict[str, float]:
    """Seconds that the longest answers of each model take from their first token to their last by the plan's
    estimates."""
    found: dict[str, float] = {}
    for unit in plan.estimates:
        for model in unit.models:
            name = plan.demands[model.member.model].name
            tpot = model.level.tpot
            if tpot is not None and math.isfinite(tpot):
                seconds = (longest_tokens(loads[name].output) - 1) * tpot
                found[name] = max(found.get(name, 0.0), seconds)
    return found


def _longest_answer(summary: Summary, name: str, load: ModelLoad) -> float | None:
    """Seconds that a model's longest answers take at the speed of those that were simulated; None if there was none,
    and 0 if nobody asked for one."""
    figures = summary.models.get(name)
    if figures is None or not figures.requests:
        return 0.0
    if not figures.completed:
        return None
    return (longest_tokens(load.output) - 1) * figures.tpot.mean if figures.tpot is not None else 0.0


def longest_sequences(plan: ClusterPlan, simulated: Simulated) -> dict[str, int]:
    """Tokens of the longest sequence of each model."""
    own = simulated.longest
    return {d.name: own.get(d.name) or d.context for d in plan.demands}


# ---------------------------------------------------------------- verified plans


@dataclass(frozen=True, slots=True)
class Verified:
    """The plan that the simulation bears out best, and that simulation. `spare` are the factors by which rates were
    raised to arrive at it."""

    plan: ClusterPlan
    prediction: Prediction
    spare: Mapping[str, float] = field(default_factory=dict)


def verified(
    demands: Sequence[Demand],
    plan: Callable[[Sequence[Demand]], ClusterPlan],
    simulate: Callable[[ClusterPlan], Prediction],
    attempts: int = ATTEMPTS,
) -> Verified:
    """Plan `demands`, simulate, and plan again with spare for the models that fall short, at most `attempts` times.

    A plan that does not even promise to meet everything is returned as it is: there is nothing to disprove.
    """
    made = plan(demands)
    best = Verified(made, simulate(made))
    spare: dict[str, float] = {}
    layouts = [_layout(made)]
    short = falls_short(best.plan, best.prediction)
    for _ in range(attempts):
        if not made.meets or not short:
            break
        spare = {**spare, **{name: spare.get(name, 1.0) * SPARE for name in short}}
        made = plan([replace(demand, rate=demand.rate * spare.get(demand.name, 1.0)) for demand in demands])
        layout = _layout(made)
        if not made.meets:
            break
        if layout in layouts:
            # The same plan again, whose simulation is known; more spare may change it.
            continue
        layouts.append(layout)
        candidate = restated(made, demands, spare)
        prediction = simulate(candidate)
        short = falls_short(candidate, prediction)
        if _badness(candidate, prediction) < _badness(best.plan, best.prediction):
            best = Verified(candidate, prediction, spare)
    return best


def _layout(plan: ClusterPlan) -> list[tuple[object, ...]]:
    """Which models are where, with what shares."""
    return [
        (unit.devices, *((each.model, each.prefill_share, each.decode_share) for each in unit.models))
        for unit in plan.placement.units
    ]


def restated(plan: ClusterPlan, demands: Sequence[Demand], spare: Mapping[str, float]) -> ClusterPlan:
    """`plan`, made for rates raised by `spare`, as a plan of the true `demands`: what is asked and served is scaled
    back; where models are, and their shares, stay."""
    units = tuple(
        replace(unit, models=tuple(replace(m, rate=m.rate / spare.get(m.model, 1.0)) for m in unit.models))
        for unit in plan.placement.units
    )
    estimates = []
    for estimate in plan.estimates:
        models = []
        for model in estimate.models:
            factor = spare.get(demands[model.member.model].name, 1.0)
            rate = model.rate / factor
            models.append(replace(model, rate=rate, throughput=min(model.throughput, rate)))
        estimates.append(replace(estimate, models=tuple(models)))
    placement = replace(plan.placement, units=units)
    return replace(plan, demands=tuple(demands), placement=placement, estimates=tuple(estimates))


def _badness(plan: ClusterPlan, prediction: Prediction) -> tuple[int, float]:
    missed = [1.0 - _kept_part(prediction, name) for name in prediction.summary.models]
    return len(falls_short(plan, prediction)), max(missed, default=0.0)
