"""One layout of a model under one load, simulated by what simulates that arrangement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from muxserve.costs.latency import CostError, LatencyModel
from muxserve.metrics.definitions import Objectives, time_per_token
from muxserve.metrics.records import RequestRecord
from muxserve.planning.gpus import unit_shares
from muxserve.planning.latency import between_steps
from muxserve.planning.phases_ground import CPU, GpuGround
from muxserve.planning.phases_layout import Ground, NoPlaceError, Place, Wanted
from muxserve.rolling.member import Objectives as RollingObjectives
from muxserve.simulator import FleetModel, Options, Overheads
from muxserve.simulator.apart import dealt
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.modes import sim_unit
from muxserve.simulator.pipeline import Pipeline, PipelineSpec
from muxserve.simulator.pipeline.costs import StageCosts
from muxserve.simulator.rolling import PhasedResult, Rolling, RollingOptions
from muxserve.simulator.unit import LeasedUnit
from muxserve.simulator.world import SimulationError
from muxserve.workload.trace import TraceRequest
from placement.cluster import PlacedModel, PlacedUnit

# Replicas that do not know of each other are alike: of more than so many only these are simulated.
_REPLICAS = 4
# Tokens of an answer that are promised to a request.
_EXPECTED_OUTPUT = 256


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
class Played:
    """What came of all requests that were simulated. `bubbles` is the part of a pipeline's active time in which each
    stage did nothing, `balance` the busiest replica's, or stage's, seconds of work over their mean (1: all work equally
    long)."""

    outcomes: list[Outcome]
    balance: float = 1.0
    bubbles: tuple[float, ...] = ()
    preemptions: int = 0


def play(
    wanted: Wanted, ground: Ground, place: Place, latency: LatencyModel, requests: Sequence[TraceRequest], rate: float
) -> Played:
    """Simulate `requests` (of `wanted.demand.name`, in order of arrival), `rate` of which come per second.

    Raises:
        NoPlaceError: the planner finds no room for the unit.
        CostError: the latency model does not know the model on these devices.
    """
    if place.layout.phases == "rolling":
        return _rolling(wanted, place, latency, requests)
    dealing = dealt(requests, place.layout.replicas, wanted.demand.slo_tpot)
    count = min(place.layout.replicas, _REPLICAS)
    parts = [[each for each, number in zip(requests, dealing, strict=True) if number == n] for n in range(count)]
    if place.layout.phases == "pipelined":
        return _pipelined(wanted, place, latency, parts)
    return _multiplexed(wanted, ground, place, latency, parts, rate)


# ---------------------------------------------------------------- arrangements


def instance_of(wanted: Wanted, place: Place) -> InstanceSpec:
    """One replica of a rolling model."""
    demand = wanted.demand
    return InstanceSpec(
        demand.architecture,
        place.shape,
        place.blocks[0],
        place.block_tokens,
        demand.max_num_seqs,
        demand.max_num_batched_tokens,
    )


def rolling_options(wanted: Wanted, replicas: int) -> RollingOptions:
    """Its scheduler's."""
    demand = wanted.demand
    assert demand.slo_ttft is not None, "without objectives there is no such layout"
    assert demand.slo_tpot is not None
    return RollingOptions(
        replicas,
        RollingObjectives(demand.slo_ttft, demand.slo_tpot, wanted.spared),
        wanted.bounds,
        # The live global scheduler does not know the mean either, and expects as much.
        _EXPECTED_OUTPUT,
    )


def pipeline_of(wanted: Wanted, place: Place) -> PipelineSpec:
    """One replica of a pipelined model."""
    demand = wanted.demand
    return PipelineSpec(
        demand.architecture,
        place.shape,
        place.blocks,
        place.block_tokens,
        # The live engine's batches together hold no more.
        demand.max_num_seqs,
        links=place.links,
    )


def _rolling(wanted: Wanted, place: Place, latency: LatencyModel, requests: Sequence[TraceRequest]) -> Played:
    spec = replace(instance_of(wanted, place), step_seconds=between_steps(latency, place.shape.device))
    options = rolling_options(wanted, place.layout.replicas)
    result: PhasedResult = Rolling(spec, latency, options).run(requests)
    outcomes = [
        Outcome(r.arrival, None)
        if r.first_token is None or r.finish is None
        else Outcome(r.arrival, r.first_token - r.arrival, r.switch_wait, r.finish - r.first_token, r.made)
        for r in result.requests
    ]
    return Played(outcomes, balance(list(result.busy.values())), preemptions=result.preemptions)


def _pipelined(wanted: Wanted, place: Place, latency: LatencyModel, parts: Sequence[Sequence[TraceRequest]]) -> Played:
    spec = replace(pipeline_of(wanted, place), step_seconds=between_steps(latency, place.shape.device))
    costs = StageCosts(latency, spec.architecture)
    records: list[RequestRecord] = []
    busy: list[list[float]] = []
    active = preemptions = 0.0
    for part in parts:
        result = Pipeline(spec, costs, wanted.budget()).run(part)
        records += result.records()
        busy.append(result.busy())
        active += result.active()
        preemptions += result.preemptions
    bubbles = tuple(
        1.0 - sum(stages[number] for stages in busy) / active if active else 0.0 for number in range(spec.stages)
    )
    return Played(_outcomes(records), balance(list(itertools.chain(*busy))), bubbles, int(preemptions))


def _multiplexed(
    wanted: Wanted,
    ground: Ground,
    place: Place,
    latency: LatencyModel,
    parts: Sequence[Sequence[TraceRequest]],
    rate: float,
) -> Played:
    demand = wanted.demand
    each = rate / place.layout.replicas
    prefill, decode = shares(wanted, ground, place, latency, each)
    unit = PlacedUnit(
        "unit",
        place.shape.device,
        tuple(range(place.layout.tp)),
        (PlacedModel(demand.name, each, prefill, decode),),
        place.kv_bytes,
    )
    model = FleetModel(
        demand.name,
        demand.architecture,
        demand.dtype,
        demand.max_num_seqs,
        demand.max_num_batched_tokens,
        wanted.max_len,
    )
    try:
        simulated = sim_unit(unit, {demand.name: model})
    except SimulationError as error:
        raise NoPlaceError(str(error)) from None
    if place.cost_share is not None:
        simulated = replace(
            simulated, models=tuple(replace(each, cost_share=place.cost_share) for each in simulated.models)
        )
    between = between_steps(latency, place.shape.device)
    options = Options(Overheads(prefill_step=between, decode_step=between), sample_seconds=0.0)
    records: list[RequestRecord] = []
    busy = []
    for part in parts:
        result = LeasedUnit(simulated, latency, options).run(part)
        records += result.records
        busy.append(result.busy_seconds)
    return Played(_outcomes(records), balance(busy), preemptions=sum(record.preemptions for record in records))


def shares(wanted: Wanted, ground: Ground, place: Place, latency: LatencyModel, rate: float) -> tuple[float, float]:
    """Shares of the compute for prefill and decode of a replica that gets `rate` requests per second: on GPUs those
    that the planner would give it.

    Raises:
        NoPlaceError: the planner finds no room.
    """
    if place.prefill_share is not None and place.decode_share is not None:
        return place.prefill_share, place.decode_share
    assert isinstance(ground, GpuGround), f"shares on {CPU} are part of the place"
    demand = replace(wanted.demand, rate=rate)
    found = unit_shares([demand], ground.kind, place.layout.tp, ground.memory, ground.rules, latency)
    if found is None:
        raise NoPlaceError("the planner sees no room for it")
    return found[demand.name].prefill, found[demand.name].decode


def balance(busy: Sequence[float]) -> float:
    """The largest over the mean; 1 if nothing was done."""
    mean = sum(busy) / len(busy) if busy else 0.0
    return max(busy) / mean if mean else 1.0


def _outcomes(records: Sequence[RequestRecord]) -> list[Outcome]:
    return list(_each(records))


def _each(records: Sequence[RequestRecord]) -> Iterator[Outcome]:
    for r in records:
        if r.first_token is None or r.finish is None or r.error:
            yield Outcome(r.arrival, None)
        else:
            yield Outcome(r.arrival, r.first_token - r.arrival, 0.0, r.finish - r.first_token, r.output_tokens)


__all__ = ["CostError", "NoPlaceError", "Outcome", "Played", "balance", "play", "shares"]
