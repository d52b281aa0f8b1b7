"""One layout of a model under one load, simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from muxserve.costs.architecture import split_layers
from muxserve.costs.latency import CostError, LatencyModel
from muxserve.metrics.definitions import Objectives, time_per_token
from muxserve.planning.gpus import unit_shares
from muxserve.planning.latency import between_steps
from muxserve.planning.phases_ground import CPU, GpuGround
from muxserve.planning.phases_layout import Ground, NoPlaceError, Place, Wanted
from muxserve.rolling.member import Objectives as RollingObjectives
from muxserve.scheduling.token_throttling import prompt_tokens_ahead
from muxserve.simulator import (
    FleetModel,
    Options,
    Overheads,
    Pipeline,
    RingRules,
    Rules,
    SimulationError,
    SimUnit,
    lone_unit,
    sim_unit,
    simulate,
)
from muxserve.workload.trace import TraceRequest
from placement.cluster import PlacedModel, PlacedUnit

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
        SimulationError: some request is never served.
    """
    layout = place.layout
    rules: Rules = {}
    count = layout.replicas
    if layout.phases == "rolling":
        rules = {wanted.demand.name: ring_rules(wanted)}
    elif count > _REPLICAS:
        chance, count = random.Random(count), _REPLICAS
        requests = [each for each in requests if chance.random() < _REPLICAS / layout.replicas]
    if layout.phases == "multiplexed":
        unit = _multiplexed(wanted, ground, place, latency, rate / layout.replicas)
    else:
        unit = unit_of(wanted, place, "unit", tuple(range(layout.stages * layout.tp)))
    units = [replace(unit, name=f"unit{number}") for number in range(count)]
    between = between_steps(latency, place.shape.device)
    options = Options(Overheads(prefill_step=between, decode_step=between), sample_seconds=0.0)
    result = simulate(units, requests, latency, options, rules)
    outcomes = [
        Outcome(r.arrival, None)
        if r.first_token is None or r.finish is None or r.error
        else Outcome(
            r.arrival,
            r.first_token - r.arrival,
            r.switch_wait if layout.phases == "rolling" else 0.0,
            r.finish - r.first_token,
            r.made,
        )
        for r in result.requests
    ]
    stages = [unit.stages or (unit.busy_seconds,) for unit in result.units]
    active = sum(unit.active for unit in result.units)
    bubbles = tuple(1.0 - sum(busy) / active if active else 0.0 for busy in zip(*stages, strict=True))
    return Played(
        outcomes,
        balance(list(itertools.chain(*stages))),
        bubbles if layout.phases == "pipelined" else (),
        sum(request.preemptions for request in result.requests),
    )


# ---------------------------------------------------------------- arrangements


def unit_of(wanted: Wanted, place: Place, name: str, devices: tuple[int, ...]) -> SimUnit:
    """One replica of a rolling or pipelined model."""
    demand, stages = wanted.demand, len(place.blocks)
    pipeline = None
    if place.layout.phases == "pipelined":
        pipeline = Pipeline(split_layers(demand.architecture.layers, stages), place.links, wanted.budget)
    return lone_unit(
        name,
        place.shape.device,
        devices,
        _model(wanted, place.max_len or wanted.longest),
        min(place.blocks),
        place.block_tokens,
        place.shape.share,
        pipeline,
        prompt_tokens_ahead(stages, demand.max_num_batched_tokens, wanted.throttle),
    )


def _model(wanted: Wanted, max_len: int | None) -> FleetModel:
    demand = wanted.demand
    return FleetModel(
        demand.name,
        demand.architecture,
        demand.dtype,
        demand.max_num_seqs,
        demand.max_num_batched_tokens,
        max_len,
    )


def ring_rules(wanted: Wanted) -> RingRules:
    """By what the replicas of a rolling model work together."""
    demand = wanted.demand
    assert demand.slo_ttft is not None, "without objectives there is no such layout"
    assert demand.slo_tpot is not None
    return RingRules(RollingObjectives(demand.slo_ttft, demand.slo_tpot, wanted.spared), wanted.bounds)


def _multiplexed(wanted: Wanted, ground: Ground, place: Place, latency: LatencyModel, rate: float) -> SimUnit:
    demand = wanted.demand
    prefill, decode = shares(wanted, ground, place, latency, rate)
    unit = PlacedUnit(
        "unit",
        place.shape.device,
        tuple(range(place.layout.tp)),
        (PlacedModel(demand.name, rate, prefill, decode),),
        place.kv_bytes,
    )
    try:
        simulated = sim_unit(unit, {demand.name: _model(wanted, wanted.max_len)})
    except SimulationError as error:
        raise NoPlaceError(str(error)) from None
    if place.cost_share is None:
        return simulated
    return replace(simulated, models=tuple(replace(each, cost_share=place.cost_share) for each in simulated.models))


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


__all__ = ["CostError", "NoPlaceError", "Outcome", "Played", "balance", "play", "shares"]
