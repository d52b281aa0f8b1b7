"""One layout of a model under one load, simulated; and the largest rate that it serves within the objectives."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from muxserve.costs.latency import LatencyModel
from muxserve.costs.measured import overheads_on
from muxserve.metrics.definitions import Objectives, time_per_token
from muxserve.planning.arrangements import arrangement
from muxserve.planning.arrangements.base import DevicePool, SimulatedLayout, Wanted
from muxserve.planning.prediction import lengths
from muxserve.simulator import Options, Rules, simulate
from muxserve.workload.trace import TraceRequest

# Of more replicas that get requests by their load only so many are simulated, with their part of the requests.
_REPLICAS = 4


class Outcome(NamedTuple):
    """What became of a request, seconds. `ttft` is from its arrival to its first token, `wait` from there to its first
    decode step, `rest` from its first token to its last, of `tokens` in all. Without a `ttft` it was refused."""

    arrival: float
    ttft: float | None
    wait: float = 0.0
    rest: float = 0.0
    tokens: int = 0

    @property
    def latency(self) -> float:
        """From its arrival to its last token; 0 if it was refused."""
        return 0.0 if self.ttft is None else self.ttft + self.rest

    @property
    def ended(self) -> float:
        """When it had its last token; before everything if it was refused."""
        return -1.0 if self.ttft is None else self.arrival + self.latency

    def times(self, switch: bool) -> tuple[float, float | None] | None:
        """TTFT and TPOT, the wait for the phase switch in the first or in the second; None if there are none."""
        if self.ttft is None:
            return None
        wait = self.wait if switch else 0.0
        return self.ttft + wait, time_per_token(wait, self.rest, self.tokens)

    def met(self, objectives: Objectives, switch: bool) -> bool:
        """Whether it was answered within all objectives."""
        found = self.times(switch)
        return found is not None and objectives.met(*found).get("all", True)


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of all requests that were simulated. `bubbles` is the part of a pipeline's active time in which each
    stage did nothing, `balance` the busiest replica's, or stage's, seconds of work over their mean (1: all work equally
    long)."""

    outcomes: list[Outcome]
    balance: float = 1.0
    bubbles: tuple[float, ...] = ()
    preemptions: int = 0


def run_trial(
    wanted: Wanted,
    pool: DevicePool,
    place: SimulatedLayout,
    latency: LatencyModel,
    requests: Sequence[TraceRequest],
    rate: float,
) -> Trial:
    """Simulate `requests` (of `wanted.demand.name`, in order of arrival), `rate` of which come per second.

    Raises:
        NoPlaceError: the planner finds no room for the unit.
        CostError: the latency model does not know the model on these devices.
        SimulationError: some request is never served.
    """
    layout, how = place.layout, arrangement(place.layout.phases)
    rules: Rules = {}
    count = layout.replicas
    ring = how.ring(wanted)
    if ring is not None:
        rules = {wanted.demand.name: ring}
    elif count > _REPLICAS:
        chance, count = random.Random(count), _REPLICAS
        requests = [each for each in requests if chance.random() < _REPLICAS / layout.replicas]
    unit = how.trial_unit(wanted, pool, place, latency, rate / layout.replicas)
    units = [replace(unit, name=f"unit{number}") for number in range(count)]
    options = Options(overheads_on(latency, place.shape.device), sample_seconds=0.0)
    result = simulate(units, requests, latency, options, rules)
    outcomes = [
        Outcome(r.arrival, None)
        if r.first_token is None or r.finish is None or r.error
        else Outcome(
            r.arrival,
            r.first_token - r.arrival,
            r.switch_wait if ring is not None else 0.0,
            r.finish - r.first_token,
            r.made,
        )
        for r in result.requests
    ]
    busy = [unit.stages or (unit.busy_seconds,) for unit in result.units]
    return Trial(
        outcomes,
        balance(list(itertools.chain(*busy))),
        how.bubbles(result.units),
        sum(request.preemptions for request in result.requests),
    )


def balance(busy: Sequence[float]) -> float:
    """The largest over the mean; 1 if nothing was done."""
    mean = sum(busy) / len(busy) if busy else 0.0
    return max(busy) / mean if mean else 1.0


# ---------------------------------------------------------------- rates

# Rates are tried on a geometric grid of 5 %, coarse ones of every fourth point (22 %).
STEP, COARSE = 1.05, 4
# How long requests come: so many times what one may take, and within these many requests.
_LONG, _FEWEST, _MOST = 4.0, 200, 2000
_SECONDS = (20.0, 120.0)
# Layouts of one arrangement are told apart by this part of that.
_BRIEF = 0.4
# Of the first part nothing is counted: the devices are empty then.
WARM = 0.25
# Where there is no objective for the first token, one that waits as long has come into a queue that grows.
QUEUED = 10.0
# Below this part of the rate that is asked for, and above as many times that, nobody looks for the goodput: so many
# requests as are simulated may be nothing to the devices even all at once.
_LEAST = 1 / 4096


class TrialLoad:
    """One seeded workload at every rate: the same requests in the same order, closer together or further apart, so
    that layouts and rates are compared on equal terms. Log-normal lengths around the demand's means, Poisson
    arrivals."""

    def __init__(self, wanted: Wanted, seed: int) -> None:
        demand, longest = wanted.demand, wanted.longest
        self._name = demand.name
        self._rng = random.Random(f"{seed}/{demand.name}/phases")
        self._prompt = lengths(demand.prompt_tokens, max(1, longest // 2))
        self._output = lengths(demand.output_tokens, max(1, longest - longest // 2))
        self._drawn: list[tuple[float, int, int]] = []
        takes = (demand.slo_ttft or 1.0) + demand.output_tokens * (demand.slo_tpot or 0.05)
        self._seconds = min(max(_LONG * takes, _SECONDS[0]), _SECONDS[1])

    def seconds(self, rate: float, brief: bool = False) -> float:
        """How long requests come at that rate."""
        return self.count(rate, brief) / rate

    def count(self, rate: float, brief: bool = False) -> int:
        """How many come; for a `brief` look not as many."""
        part = _BRIEF if brief else 1.0
        return int(min(max(part * rate * self._seconds, _FEWEST), part * _MOST))

    def requests(self, rate: float, brief: bool = False) -> list[TraceRequest]:
        """All requests at that rate."""
        count = self.count(rate, brief)
        at = self._drawn[-1][0] if self._drawn else 0.0
        while len(self._drawn) < count:
            at += self._rng.expovariate(1.0)
            self._drawn.append((at, self._prompt.sample(self._rng), self._output.sample(self._rng)))
        return [TraceRequest(when / rate, self._name, p, o) for when, p, o in self._drawn[:count]]


def objectives_of(wanted: Wanted) -> Objectives:
    """The model's, and one for the first token in any case."""
    demand = wanted.demand
    return Objectives(QUEUED if demand.slo_ttft is None else demand.slo_ttft, demand.slo_tpot)


class GoodputSearch:
    """The rates of one layout; `brief`: with fewer requests. What was simulated once is kept."""

    def __init__(
        self,
        wanted: Wanted,
        pool: DevicePool,
        place: SimulatedLayout,
        latency: LatencyModel,
        load: TrialLoad,
        brief: bool = False,
    ) -> None:
        self.place = place
        self._brief = brief
        self._wanted, self._pool, self._latency, self._load = wanted, pool, latency, load
        self._objectives = objectives_of(wanted)
        self._found: dict[int, dict[bool, float]] = {}

    @property
    def devices(self) -> int:
        """Those of the pool. On a CPU several engines share one."""
        return self._pool.devices

    @property
    def simulations(self) -> int:
        """Rates that were simulated."""
        return len(self._found)

    def at(self, rate: float) -> Trial:
        """What happens at that rate.

        Raises:
            NoPlaceError, CostError: as `run_trial`.
        """
        return run_trial(
            self._wanted, self._pool, self.place, self._latency, self._load.requests(rate, self._brief), rate
        )

    def seconds(self, rate: float) -> float:
        """How long requests come at that rate."""
        return self._load.seconds(rate, self._brief)

    def part_met(self, trial: Trial, rate: float, switch: bool) -> float:
        """Part of the requests within the objectives, but for the first ones; see `Outcome.times` for `switch`."""
        return part_met(trial, self._objectives, WARM * self.seconds(rate), switch)

    def attained(self, point: int, switch: bool = True) -> float:
        """The same at a point of the grid."""
        if point not in self._found:
            rate = STEP**point
            trial = self.at(rate)
            self._found[point] = {each: self.part_met(trial, rate, each) for each in (True, False)}
        return self._found[point][switch]

    def goodput(self, share: float, start: int, stride: int = 1, switch: bool = True) -> float:
        """The largest rate at which `share` of the requests are within the objectives, on every `stride`-th point of
        the grid, looked for from `start` on; 0 if there is none down to a small part of it, and at most as many times
        as much. The attainment falls with the rate, so that one crossing is looked for."""
        reach = stride * math.floor(-math.log(_LEAST) / math.log(STEP) / stride)

        def good(point: int) -> bool:
            return self.attained(point, switch) >= share

        low, high = bracket(good, start, 2 * stride, reach)
        if low is None:
            return 0.0
        while high - low > stride:
            middle = low + stride * ((high - low) // (2 * stride))
            low, high = (middle, high) if good(middle) else (low, middle)
        return STEP**low


def bracket(good: Callable[[int], bool], start: int, stride: int, reach: int) -> tuple[int | None, int]:
    """A point that is good, and one above it that is not; strides double as one goes, up to `reach` from `start`. None
    if no point down to there is good, twice the last point if all up to there are."""
    point, up = start, good(start)
    while True:
        if not up and point == start - reach:
            return None, point
        if up and point == start + reach:
            return point, point
        following = min(point + stride, start + reach) if up else max(point - stride, start - reach)
        if good(following) != up:
            return min(point, following), max(point, following)
        point, stride = following, 2 * stride


def part_met(trial: Trial, objectives: Objectives, after: float, switch: bool) -> float:
    """Part of the requests that came after that time and met all objectives; 1.0 of none."""
    counted = [outcome for outcome in trial.outcomes if outcome.arrival >= after]
    return sum(outcome.met(objectives, switch) for outcome in counted) / len(counted) if counted else 1.0


def point_of(rate: float, stride: int = 1) -> int:
    """The point of the grid nearest to a rate."""
    return stride * round(math.log(rate) / math.log(STEP) / stride)
