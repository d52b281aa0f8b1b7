"""The steps of `muxserve plan`: a plan on GPUs or on this machine's CPU, its simulation, and the arrangements of
prefill and decode in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from muxserve.cli.plan_phases import progress
from muxserve.config import Fleet, load_fleet
from muxserve.costs.latency import CostError, LatencyModel
from muxserve.planning.demands import demands_of, equal_nodes, memory_of
from muxserve.planning.document import SweepPoint, point
from placement.cluster import Cluster
from placement.demand import Demand
from placement.format import enumerate_words
from placement.improve import ImproveLimits
from placement.memory import MemoryRules
from placement.objective import OBJECTIVES, Objective
from placement.planner import MODES, ClusterPlan, PlanOptions, plan_cluster

if TYPE_CHECKING:
    from muxserve.planning.dedicated_units import Arrangements
    from muxserve.planning.device_pool import CpuPool
    from muxserve.planning.prediction import Prediction

Tell = Callable[[str], None]
_SIMULATED_REQUESTS, _SIMULATED_SECONDS = 5000, 300.0


# What `muxserve plan` does unless it is told otherwise, which is also what `muxserve simulate` places by.
SEARCH_SECONDS = 10.0
ATTAINMENT = 0.95


def options_of(
    fleet: Fleet,
    mode: str,
    seed: int = 0,
    objective: str = "auto",
    attainment: float = ATTAINMENT,
    exact: bool = False,
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
        exact=exact,
        rules=MemoryRules.served(fleet.cluster.gpu_memory),
        local=ImproveLimits(seed=seed),
    )


class UsageError(ValueError):
    """The command line is wrong."""


@dataclass(slots=True)
class Made:
    """What came of it. `simulated` is the simulation of the plan (`why_not`: why there is none), `spare` the factors by
    which rates were raised in planning. `lengths` is the longest sequence of models of which this machine says it,
    tokens."""

    plan: ClusterPlan
    simulated: Prediction | None = None
    why_not: str = ""
    points: list[SweepPoint] = field(default_factory=list)
    spare: Mapping[str, float] = field(default_factory=dict)
    arrangements: Arrangements | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planning:
    """One run of the command. `seconds` may be spent on the local search; `simulate` is how long the plan is simulated
    (None: as long as makes sense). `compare` are the models whose arrangements are compared whatever the file says,
    `network` is bytes per second between machines. Without `goodputs` that of arrangements is looked for only where
    several are compared. `told` is told what goes on; `alone` takes that off the screen for a
    while."""

    file: Path
    fleet: Fleet
    latency: LatencyModel
    options: PlanOptions
    seconds: float
    simulate: float | None
    seed: int
    compare: tuple[str, ...]
    network: float
    told: Tell
    alone: Callable[[], AbstractContextManager[None]]
    goodputs: bool = True

    @property
    def arranges(self) -> bool:
        """Whether some model is not simply multiplexed. Baselines know nothing but that."""
        from muxserve.planning.dedicated_units import concerns

        return self.options.mode == "muxserve" and concerns(self.fleet, self.compare)

    # ------------------------------------------------------------ GPUs

    def on_gpus(self, cluster: Cluster) -> Made:
        """A plan for a cluster."""
        demands = demands_of(self.fleet, self.file.parent)
        made = self._place(demands, cluster)
        if not self.arranges:
            return self._borne_out(made, demands, cluster)
        from muxserve.planning.dedicated_units import divide_gpus

        with self.alone(), progress() as tell:
            divided = divide_gpus(
                self.fleet,
                demands,
                made,
                self.latency,
                self.options.rules,
                self.network,
                self.compare,
                self.seed,
                tell,
                self.goodputs,
            )
        if not divided.has_dedicated:
            found = self._borne_out(made, demands, cluster)
        else:
            shared = divided.arrangements.shared
            rest = None
            if shared and divided.left.devices:
                rest = self._borne_out(self._place(shared, divided.left), shared, divided.left)
            if divided.crowds_out(self.fleet, made, rest.plan if rest else None):
                found = self._borne_out(made, demands, cluster)
                names = enumerate_words([each.demand.name for each in divided.arrangements.arranged])
                divided.arrangements.notes.append(
                    f"{names}: multiplexed after all, or other models would have no place"
                )
            else:
                found = rest or Made(made)
                found.plan = divided.joined(rest.plan if rest else None, self.options.objective)
                found.simulated, found.why_not = self._simulated(found.plan)
        found.arrangements = divided.arrangements
        return found

    def swept(self, sizes: Sequence[int], cluster: Cluster) -> Made:
        """A plan for every size; the first that meets everything, else the last."""
        demands = demands_of(self.fleet, self.file.parent)
        points: list[SweepPoint] = []
        chosen: ClusterPlan | None = None
        each = max(0.5, self.seconds / len(sizes))
        for size in sizes:
            here = equal_nodes(size, cluster.nodes[0].device, self.fleet.cluster.gpus_per_node)
            made = self._place(demands, here, each, f"{size} GPUs: ")
            points.append(point(made))
            if chosen is None or not chosen.meets:
                chosen = made
        assert chosen is not None
        simulated, why_not = self._simulated(chosen)
        return Made(chosen, simulated, why_not, points)

    def _place(
        self, demands: Sequence[Demand], cluster: Cluster, seconds: float | None = None, before: str = ""
    ) -> ClusterPlan:
        until = time.monotonic() + (self.seconds if seconds is None else seconds)
        return plan_cluster(
            demands,
            cluster,
            self.latency,
            memory_of(cluster),
            self.options,
            lambda: time.monotonic() >= until,
            lambda text: self.told(before + text),
        )

    def _borne_out(self, first: ClusterPlan, demands: Sequence[Demand], cluster: Cluster) -> Made:
        """The plan, or one with spare for models that fall short in its simulation."""
        simulated, why_not = self._simulated(first)
        if simulated is None or self.options.objective.name == "throughput":
            return Made(first, simulated, why_not)
        from muxserve.planning.prediction import verified

        known = {id(first): simulated}

        def plan(asked: Sequence[Demand]) -> ClusterPlan:
            return first if asked is demands else self._place(asked, cluster, before="again: ")

        def simulate(made: ClusterPlan) -> Prediction:
            prediction = known.get(id(made)) or self._simulated(made)[0]
            assert prediction is not None, "what could be simulated once can be simulated again"
            return prediction

        again = verified(demands, plan, simulate)
        return Made(again.plan, again.prediction, spare=again.spare)

    # ------------------------------------------------------------ CPU

    def on_cpu(self) -> Made:
        """A plan for this machine."""
        from muxserve.cluster.machine import this_machine
        from muxserve.planning.dedicated_units import Arrangements, divide_cpu
        from muxserve.planning.device_pool import cpu_pool
        from muxserve.planning.this_machine import plan_this_machine

        resolved, own = load_fleet(self.file), self.fleet.cluster
        demands = demands_of(self.fleet, self.file.parent, gpu=False)
        pool = cpu_pool(this_machine(), own.cores, self.fleet.kv_pool.size, own.ranks)
        found = Arrangements(shared=list(demands))
        if self.arranges:
            with self.alone(), progress() as tell:
                found = divide_cpu(
                    self.fleet, demands, pool, self.latency, self.compare, self.seed, tell, self.goodputs
                )
        try:
            made = plan_this_machine(resolved, demands, found, pool, self.latency, self.options.objective)
        except ValueError as error:
            raise UsageError(str(error)) from None
        simulated, why_not = self._simulated(made.plan, made.lengths, pool)
        arrangements = found if self.arranges else None
        return Made(made.plan, simulated, why_not, arrangements=arrangements, lengths=made.lengths)

    # ------------------------------------------------------------ simulation

    def _simulated(
        self, made: ClusterPlan, max_len: Mapping[str, int] | None = None, pool: CpuPool | None = None
    ) -> tuple[Prediction | None, str]:
        """The simulation of the plan, or why there is none. `pool` is the machine whose CPU it is for."""
        from muxserve.planning.arrangements.base import NoPlaceError
        from muxserve.planning.prediction import Surroundings, predict, simulated_of
        from muxserve.simulator import SimulationError

        seconds = self.simulate
        if seconds is None:
            # Long enough for the longest answers to come and go, unless that takes too long.
            seconds = min(_SIMULATED_SECONDS, _SIMULATED_REQUESTS / made.asked)
        if seconds <= 0 or not made.placement.units:
            return None, ""
        self.told("simulating")

        def count(done: int, total: int) -> None:
            self.told(f"simulating, {done} of {total} requests")

        around = Surroundings(self.options.rules, self.network, pool)
        try:
            return (
                predict(
                    made.placement,
                    made.demands,
                    self.latency,
                    seconds,
                    self.seed,
                    made.mode,
                    max_len or {},
                    count,
                    simulated_of(made.placement, self.fleet, made.demands, max_len or {}, around),
                ),
                "",
            )
        except (SimulationError, CostError, NoPlaceError) as error:
            return None, str(error)
