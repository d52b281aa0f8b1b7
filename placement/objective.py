"""What a placement is good for: one number per replica, summed over the fleet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from placement.candidates import MEETS
from placement.demand import Demand
from placement.estimator import ServiceLevel

ObjectiveName = Literal["throughput", "slo", "gpus"]
OBJECTIVES: tuple[ObjectiveName, ...] = ("throughput", "slo", "gpus")

# Shorter latencies are worth at most this part of a request, so that they decide between placements that serve the
# same.
_TIE = 1e-3
_TYPICAL_STEP = 0.05
_TYPICAL_TTFT = 1.0
_MET = 1000.0


@dataclass(frozen=True, slots=True)
class Objective:
    """`throughput`: requests served per second (Eq. 1 of arXiv:2404.02015), each counting its demand's `weight`.
    `slo`: those that meet their model's objectives. `gpus`: as few devices as possible, while every model meets its
    rate and `attainment` of its requests their objectives."""

    name: ObjectiveName = "throughput"
    attainment: float = 0.95

    def member(self, demand: Demand, asked: float, served: float, level: ServiceLevel) -> float:
        """What one replica adds: `asked` and `served` in requests per second."""
        # All bounded, so that no latency outweighs a request.
        steps = demand.decode_steps * (level.tpot or 0.0)
        late = (level.ttft + steps) / (_TYPICAL_TTFT + demand.decode_steps * _TYPICAL_STEP)
        tie = _TIE if math.isinf(late) else _TIE * late / (1.0 + late)
        if self.name == "throughput":
            return demand.weight * served * (1.0 - tie)
        if self.name == "slo":
            # A little for what is served late, so that there is a way up from nowhere.
            return demand.weight * (asked * level.attainment * (1.0 - tie) + 0.01 * served)
        share = asked / demand.rate
        meets = served >= MEETS * asked and level.attainment >= self.attainment
        goal = 1.0 if meets else 0.5 * min(1.0, served / asked) * (0.5 + 0.5 * level.attainment)
        return share * (_MET * goal - tie)

    def content(self, asked: float, served: float, attainment: float) -> bool:
        """Whether more for this replica could only make it a little quicker."""
        if self.name == "throughput":
            return served >= asked
        return served >= asked and attainment >= (self.attainment if self.name == "gpus" else 0.999)

    def unit(self, devices: int) -> float:
        """What a unit costs."""
        return -float(devices) if self.name == "gpus" else 0.0

    def missing(self, demand: Demand) -> float:
        """What a model that is placed nowhere costs: more than anything else can make good."""
        return -1e6 * (1.0 + demand.weight * demand.rate)
