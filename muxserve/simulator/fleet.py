"""Simulates all units of a fleet on one workload."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from muxserve.costs import LatencyModel
from muxserve.costs.front_end import engines_only
from muxserve.metrics.records import RequestRecord
from muxserve.simulator.apart import Apart, ApartResult, play_apart
from muxserve.simulator.combined import CombinedUnit
from muxserve.simulator.setup import Options, SimUnit
from muxserve.simulator.timeline import Timeline
from muxserve.simulator.unit import LeasedUnit
from muxserve.simulator.world import UnitResult, World
from muxserve.workload.trace import TraceRequest

_PROGRESS_EVERY = 200


@dataclass(slots=True)
class FleetResult:
    """What happened. `records` are in the order of the workload, `seconds` is when the last request ended."""

    records: list[RequestRecord]
    units: list[UnitResult]
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = max((unit.seconds for unit in self.units), default=0.0)

    @property
    def jobs(self) -> int:
        """Engine steps."""
        return sum(unit.jobs for unit in self.units)

    @property
    def devices(self) -> int:
        """Devices that the units have."""
        return sum(unit.devices for unit in self.units)

    @property
    def gpu_seconds(self) -> float:
        """Device-seconds that the fleet occupied: every device for as long as the run took."""
        return self.devices * self.seconds

    @property
    def busy_gpu_seconds(self) -> float:
        """Device-seconds in which some job ran."""
        return sum(unit.devices * unit.busy_seconds for unit in self.units)

    @property
    def timelines(self) -> list[Timeline]:
        """All that were kept."""
        found = []
        for unit in self.units:
            found += [unit.timeline] if unit.timeline is not None else []
            found += unit.timelines if isinstance(unit, ApartResult) else []
        return found


def make_world(unit: SimUnit, latency: LatencyModel, options: Options | None = None) -> World:
    """What runs such a unit."""
    return CombinedUnit(unit, latency, options) if unit.combined else LeasedUnit(unit, latency, options)


def simulate(
    units: Sequence[SimUnit],
    workload: Iterable[TraceRequest],
    latency: LatencyModel,
    options: Options | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    apart: Sequence[Apart] = (),
) -> FleetResult:
    """Play `workload` (in order of arrival) on the units, and on those of the models `apart`, whose results follow.

    Requests of a model with several replicas go to them at random, in proportion to the replicas' rates; those of a
    model apart as it says. The same `seed` gives the same result. `progress` is told requests that have arrived, and
    all there are.

    Raises:
        SimulationError: arrivals fall, or a unit cannot go on.
        CostError: the latency model does not know a model or shape.
    """
    split = _Split(units, seed, apart)
    for request in workload:
        split.add(request)
    records = split.records
    results: list[UnitResult] = []
    done = split.refused
    for unit, requests, places in zip(units, split.requests, split.places, strict=True):
        result = make_world(unit, latency, options).run(_told(requests, done, split.count, progress))
        done += len(requests)
        for place, record in zip(places, result.records, strict=True):
            records[place] = record
        results.append(result)
    engines = engines_only(latency)
    for model in apart:
        numbers = split.apart_places[model.name]
        if progress is not None:
            progress(done, split.count)
        found, played = play_apart(model, split.apart[model.name], engines, options or Options())
        done += len(numbers)
        records.update(zip(numbers, found, strict=True))
        results += played
    if progress is not None:
        progress(split.count, split.count)
    return FleetResult([records[index] for index in range(split.count)], results)


def _told(
    requests: Sequence[TraceRequest], done: int, count: int, progress: Callable[[int, int], None] | None
) -> Iterator[TraceRequest]:
    for number, request in enumerate(requests):
        if progress is not None and number % _PROGRESS_EVERY == 0:
            progress(done + number, count)
        yield request


class _Split:
    """The workload, divided among units."""

    def __init__(self, units: Sequence[SimUnit], seed: int, apart: Sequence[Apart]) -> None:
        self.apart: dict[str, list[TraceRequest]] = {model.name: [] for model in apart}
        self.apart_places: dict[str, list[int]] = {model.name: [] for model in apart}
        self.requests: list[list[TraceRequest]] = [[] for _ in units]
        self.places: list[list[int]] = [[] for _ in units]
        self.records: dict[int, RequestRecord] = {}
        self.count = 0
        self.refused = 0
        self._chance = random.Random(seed)
        self._replicas: dict[str, list[int]] = {}
        rates: dict[str, list[float]] = {}
        for index, unit in enumerate(units):
            for model in unit.models:
                self._replicas.setdefault(model.name, []).append(index)
                rates.setdefault(model.name, []).append(model.profile.rate)
        self._cumulative = {name: list(accumulate(each)) for name, each in rates.items()}

    def add(self, request: TraceRequest) -> None:
        replicas = self._replicas.get(request.model)
        place = self.count
        self.count += 1
        if request.model in self.apart:
            self.apart[request.model].append(request)
            self.apart_places[request.model].append(place)
            return
        if replicas is None:
            self.refused += 1
            self.records[place] = RequestRecord(
                model=request.model,
                arrival=request.arrival,
                prompt_tokens=request.prompt_tokens,
                output_tokens=0,
                error=f"no unit serves {request.model}",
            )
            return
        index = replicas[0]
        if len(replicas) > 1:
            index = self._chance.choices(replicas, cum_weights=self._cumulative[request.model])[0]
        self.requests[index].append(request)
        self.places[index].append(place)
