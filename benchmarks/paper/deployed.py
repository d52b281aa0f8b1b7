"""What `muxserve deploy` serves with `memory:` on GPUs, simulated, with the time of each token.

Every unit is simulated for itself: its models have one replica each. A request is judged in two ways:

- `in_time`: its first token came within the objective, and its last one within as many times the time between tokens
  as it has tokens more (docs/residency.md).
- `time_within`: the part of its time that was within the objectives, as Aegaeon measures it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from muxserve.config import load_fleet
from muxserve.costs.measured import overheads_on
from muxserve.costs.roofline import Roofline
from muxserve.planning.candidates.device_pool import Surroundings
from muxserve.planning.demand.demands import cluster_of, demands_of, memory_of
from muxserve.planning.place.sleeping import as_deployed
from muxserve.simulator import Options, SimUnit, mode_of
from muxserve.simulator.leased import PhaseEngine
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.scheduler import EngineTypes
from muxserve.simulator.unit import SimulatedUnit
from muxserve.workload.trace import TraceRequest
from placement.memory import MemoryRules


@dataclass(frozen=True)
class Served:
    """What became of a request: when each of its tokens was with the client, seconds after it came. Without tokens for
    one that was refused for the reason `error`."""

    model: str
    tokens: tuple[float, ...]
    error: str = ""

    def in_time(self, ttft: float, tpot: float) -> bool:
        """Whether its first and its last token came in time."""
        if not self.tokens:
            return False
        return self.tokens[0] <= ttft and self.tokens[-1] <= ttft + (len(self.tokens) - 1) * tpot

    def first_in_time(self, ttft: float) -> bool:
        """Whether its first token came in time."""
        return bool(self.tokens) and self.tokens[0] <= ttft

    def time_within(self, ttft: float, tpot: float) -> float:
        """The part of its time within the objectives (Aegaeon, artifact of SOSP'25): each token has until a moment that
        is `ttft` seconds after the beginning for the first one and `tpot` later for each one more. A token that comes
        later is a new beginning, up to which only what was allowed to the last token in time counts; allowances grow
        on."""
        if not self.tokens or not self.tokens[-1]:
            return float(bool(self.tokens))
        begun = within = kept = 0.0
        allowed = ttft
        for at in self.tokens:
            if at - begun <= allowed:
                kept = allowed
            else:
                within, begun, kept = within + kept, at, 0.0
            allowed += tpot
        return (within + min(allowed, self.tokens[-1] - begun)) / self.tokens[-1]


class TimedRequest(SimRequest):
    """A request that remembers when its tokens came."""

    __slots__ = ("times",)
    times: list[float]

    def got_token(self, now: float) -> None:
        super().got_token(now)
        self.times.append(now)


class TimedEngine(PhaseEngine):
    """An engine that writes down the time of each token."""

    def _trace(self, counter: int) -> None:
        batch, after = self.batch, self.machine.overheads.token
        for step in range(self._traced + 1, counter + 1):
            at = batch.time_of(step) + after
            for request in batch.running:
                request.times.append(at)  # type: ignore[attr-defined]
        self._traced = max(self._traced, counter)

    def _mixed(self, now: float) -> None:
        for request in self.batch.running:
            request.times.append(now + self.machine.overheads.token)  # type: ignore[attr-defined]
        super()._mixed(now)


def deployed(fleet: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> list[SimUnit]:
    """The units that `muxserve deploy` makes of a fleet file of these keys. `configs` are the config.json of models
    that it names as `architecture: NAME.json`.

    Raises:
        FleetError, NoUnitError: it makes none.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs.items():
            (Path(folder) / f"{name}.json").write_text(json.dumps(config))
        file = Path(folder) / "fleet.yaml"
        file.write_text(yaml.safe_dump(dict(fleet)))
        loaded = load_fleet(file, serving=False)
        cluster = cluster_of(loaded)
        assert cluster is not None, "the fleet is on GPUs"
        demands = demands_of(loaded, file.parent, gpus=memory_of(cluster).items())
    own = loaded.cluster
    around = Surroundings(MemoryRules.served(own.gpu_memory), own.network)
    return as_deployed(loaded, demands, cluster, around).units(mode_of("muxserve"))


def with_wakes(unit: SimUnit, bandwidth: float) -> SimUnit:
    """The unit whose wakes take what copying the weights takes at so many bytes per second, and nothing else."""
    residency = unit.residency
    assert residency is not None, "memory decides in the unit"
    weights = {model.name: model.architecture.weight_bytes(model.dtype) / unit.tp for model in unit.models}
    costs = {name: replace(each, seconds=weights[name] / bandwidth) for name, each in residency.models.items()}
    return replace(unit, residency=replace(residency, models=costs, started_seconds=0.0))


@dataclass(frozen=True)
class UnitRun:
    """What became of the requests of a unit, and what its models did."""

    requests: tuple[Served, ...]
    wakes: int
    switches: int


def serve(units: Sequence[SimUnit], load: Sequence[TraceRequest], between: float = 0.0) -> list[UnitRun]:
    """Serve the requests, on as many processes as there are cores. Each step begins `between` seconds later than a
    deployed one would."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        return list(processes.map(partial(_serve_one, load=load, between=between), units))


def _serve_one(unit: SimUnit, load: Sequence[TraceRequest], between: float) -> UnitRun:
    latency = Roofline()
    overheads = overheads_on(latency, unit.device)
    overheads = msgspec.structs.replace(overheads, between=overheads.between + between)
    options = Options(overheads, sample_seconds=0.0, timeline=True)
    world = SimulatedUnit(unit, latency, options, engine_types=EngineTypes(TimedEngine))
    names = {model.name for model in unit.models}
    requests = [TimedRequest.of(each, number) for number, each in enumerate(load) if each.model in names]
    for request in requests:
        request.times = []
    world.clock.run(iter(requests), world.arrive, world.machine.overheads.request)
    found = world.result()
    for request in requests:
        assert request.error or len(request.times) == request.output, "each token has a time"
    served = tuple(_served(request) for request in requests)
    residency = found.residency
    return UnitRun(served, residency.wakes if residency else 0, residency.switches if residency else 0)


def _served(request: TimedRequest) -> Served:
    return Served(request.model, tuple(at - request.arrival for at in request.times), request.error)
