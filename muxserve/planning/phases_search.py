"""The largest rate that a layout serves within the objectives, and what it does at one rate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from muxserve.costs.latency import LatencyModel
from muxserve.metrics.definitions import Objectives
from muxserve.planning.phases_layout import Ground, Place, Wanted
from muxserve.planning.phases_play import Played, play
from muxserve.planning.predict import lengths
from muxserve.workload.trace import TraceRequest

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


class Load:
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


class Search:
    """The rates of one layout; `brief`: with fewer requests. What was simulated once is kept."""

    def __init__(
        self, wanted: Wanted, ground: Ground, place: Place, latency: LatencyModel, load: Load, brief: bool = False
    ) -> None:
        self.place = place
        self._brief = brief
        self._wanted, self._ground, self._latency, self._load = wanted, ground, latency, load
        self._objectives = objectives_of(wanted)
        self._found: dict[int, dict[bool, float]] = {}

    @property
    def devices(self) -> int:
        """Those of the ground. On a CPU several engines share one."""
        return self._ground.devices

    @property
    def simulations(self) -> int:
        """Rates that were simulated."""
        return len(self._found)

    def at(self, rate: float) -> Played:
        """What happens at that rate.

        Raises:
            NoPlaceError, CostError: as `play`.
        """
        return play(self._wanted, self._ground, self.place, self._latency, self._load.requests(rate, self._brief), rate)

    def seconds(self, rate: float) -> float:
        """How long requests come at that rate."""
        return self._load.seconds(rate, self._brief)

    def part_met(self, played: Played, rate: float, switch: bool) -> float:
        """Part of the requests within the objectives, but for the first ones; see `Outcome.times` for `switch`."""
        return part_met(played, self._objectives, WARM * self.seconds(rate), switch)

    def attained(self, point: int, switch: bool = True) -> float:
        """The same at a point of the grid."""
        if point not in self._found:
            rate = STEP**point
            played = self.at(rate)
            self._found[point] = {each: self.part_met(played, rate, each) for each in (True, False)}
        return self._found[point][switch]

    def goodput(self, share: float, start: int, stride: int = 1, switch: bool = True) -> float:
        """The largest rate at which `share` of the requests are within the objectives, on every `stride`-th point of
        the grid, looked for from `start` on; 0 if there is none down to a small part of it, and at most as many times
        as much. The attainment falls with the rate, so that one crossing is looked for."""
        reach = stride * math.floor(-math.log(_LEAST) / math.log(STEP) / stride)

        def good(point: int) -> bool:
            return self.attained(point, switch) >= share

        low, high = _bracket(good, start, 2 * stride, reach)
        if low is None:
            return 0.0
        while high - low > stride:
            middle = low + stride * ((high - low) // (2 * stride))
            low, high = (middle, high) if good(middle) else (low, middle)
        return STEP**low


def _bracket(good: Callable[[int], bool], start: int, stride: int, reach: int) -> tuple[int | None, int]:
    """A point that is good, and one above it that is not; strides double as one goes, but not further than `reach`."""
    point, up = start, good(start)
    while True:
        following = point + (stride if up else -stride)
        if following <= start - reach:
            return None, point
        if following >= start + reach:
            return point, point
        if good(following) != up:
            return min(point, following), max(point, following)
        point, stride = following, 2 * stride


def part_met(played: Played, objectives: Objectives, after: float, switch: bool) -> float:
    """Part of the requests that came after that time and met all objectives; 1.0 of none."""
    counted = [outcome for outcome in played.outcomes if outcome.arrival >= after]
    return sum(outcome.met(objectives, switch) for outcome in counted) / len(counted) if counted else 1.0


def point_of(rate: float, stride: int = 1) -> int:
    """The point of the grid nearest to a rate."""
    return stride * round(math.log(rate) / math.log(STEP) / stride)
