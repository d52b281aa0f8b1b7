"""The fleets and loads of MuxServe's evaluation (arXiv:2404.02015, section 4), and how one of them is run.

Where the paper leaves something open it is chosen here: which sizes are the popular ones (a seeded shuffle), Poisson
arrivals for a minute, lengths log-normal around ShareGPT's means as the paper gives them (161 and 338 tokens). SLOs are
multiples of the latency alone on the fewest GPUs that hold the model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inputs import DEVICE, DTYPE, costs, fleet_model, llama, placed_unit

from muxserve.costs import LatencyModel
from muxserve.costs.devices import device
from muxserve.metrics.summary import Summary, summarise
from muxserve.simulator import AloneSimulation, Mode, SimUnit, mode_of, simulate, units_of
from muxserve.workload import LogNormalLengths, ModelLoad, generate, power_law_rates
from placement.cluster import Cluster, Node, Placement
from placement.demand import Demand
from placement.planner import ClusterPlan, ModeName, PlanOptions, plan_cluster

PROMPT, OUTPUT = 161, 338
# With it prompt and answer fit into LLaMA's 2,048 tokens.
LONGEST = 1352
SLO_SCALES = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)
SIZES_19 = ("7b",) * 12 + ("13b",) * 4 + ("30b",) * 2 + ("65b",)
# The fewest A100-80GB that hold a model and leave room for its KV.
ALONE_ON = {"7b": 1, "13b": 1, "30b": 2, "65b": 4}
# The meshes of its spatial baseline (benchmark/chatlmsys/muxserve2spatial.py of the MuxServe repository).
AUTHORS_MESH = {"7b": 1, "13b": 2, "30b": 2, "65b": 4}


# MuxServe with a part taken away, as in figure 10.
ABLATIONS = {
    mode.name: mode
    for mode in (
        Mode("no-split", "without the split of phases: one engine per model", policy="free", one_engine=True),
        Mode("no-unified-kv", "with a fixed quota of KV cache for each model", adapt_quotas=False),
        Mode("no-sm", "without management of compute: every job on all of it", policy="adbs", managed=False),
    )
}


@dataclass(frozen=True)
class Scenario:
    """Sizes and rates (requests per second) of the models, and the GPUs of each node. Requests of models in `longer`
    are so many times as long as `prompt` and `output` say."""

    sizes: Mapping[str, str]
    rates: Mapping[str, float]
    nodes: tuple[int, ...]
    seconds: float = 60.0
    seed: int = 0
    prompt: int = PROMPT
    output: int = OUTPUT
    longer: Mapping[str, float] = field(default_factory=dict)

    @property
    def demands(self) -> list[Demand]:
        """As the planner takes them."""
        return [
            Demand(
                name,
                llama(size),
                DTYPE,
                rate=self.rates[name],
                prompt_tokens=self.prompt,
                output_tokens=self.output,
            )
            for name, size in self.sizes.items()
        ]

    @property
    def cluster(self) -> Cluster:
        """The machines."""
        return Cluster(tuple(Node(DEVICE, count) for count in self.nodes))


def synthetic(alpha: float, highest: float, seed: int = 0, seconds: float = 60.0) -> Scenario:
    """19 models on 4 nodes of 8 GPUs; rates fall as a power law of exponent `alpha` from `highest`."""
    sizes = list(SIZES_19)
    random.Random(f"sizes/{seed}").shuffle(sizes)
    names = [f"{size}-{rank}" for rank, size in enumerate(sizes)]
    shares = power_law_rates(names, 1.0, alpha)
    scale = highest / max(shares.values())
    rates = {name: share * scale for name, share in shares.items()}
    return Scenario(dict(zip(names, sizes, strict=True)), rates, (8, 8, 8, 8), seconds, seed)


def place(scenario: Scenario, mode: ModeName, latency: LatencyModel) -> ClusterPlan:
    """The planner's answer."""
    memory = {DEVICE: device(DEVICE).memory_bytes}
    return plan_cluster(scenario.demands, scenario.cluster, latency, memory, PlanOptions(mode=mode))


def authors_spatial(scenario: Scenario) -> Placement:
    """Spatial partitioning by the rule of MuxServe's own baseline: meshes whose size follows from the model's size
    alone, whatever its rate. GPUs that this leaves over stay idle.

    Raises:
        ValueError: there are too few GPUs.
    """
    units, first = [], 0
    for name, size in scenario.sizes.items():
        gpus = AUTHORS_MESH[size]
        model = fleet_model(name, size)
        units.append(placed_unit(name, first, gpus, {name: (model, scenario.rates[name], 1.0, 1.0)}))
        first += gpus
    if first > sum(scenario.nodes):
        raise ValueError(f"{first} GPUs are needed, and there are {sum(scenario.nodes)}")
    return Placement(scenario.cluster, tuple(units))


def run(scenario: Scenario, placement: Placement, mode: str, latency: LatencyModel, quotas: bool = True) -> Summary:
    """Simulate the scenario's load on the placement; without `quotas`, pages go to whoever takes them first."""

    def lengths(name: str, mean: int) -> LogNormalLengths:
        mean = round(mean * scenario.longer.get(name, 1.0))
        return LogNormalLengths(mean / 1.377, 0.8, 1, min(4 * mean, LONGEST))

    loads = {
        name: ModelLoad(rate, lengths(name, scenario.prompt), lengths(name, scenario.output))
        for name, rate in scenario.rates.items()
    }
    models = {name: fleet_model(name, size) for name, size in scenario.sizes.items()}
    # The paper's policy where a mode leaves it to the unit.
    how = ABLATIONS.get(mode) or mode_of(mode)
    units = units_of(placement, models, replace(how, policy=how.policy or "adbs"))
    if not quotas:
        units = [_without_quotas(unit) for unit in units]
    result = simulate(units, generate(loads, scenario.seconds, scenario.seed), latency)
    return summarise(result.records, rates=scenario.rates, reference=alone(scenario, latency), slo_scales=SLO_SCALES)


def _without_quotas(unit: SimUnit) -> SimUnit:
    pages = {pool.name: pool.pages for pool in unit.pools}
    models = (replace(m, profile=replace(m.profile, quota_pages=pages[m.profile.kv.pool])) for m in unit.models)
    return replace(unit, models=tuple(models), adapt_quotas=False)


def alone(scenario: Scenario, latency: LatencyModel) -> AloneSimulation:
    """Latencies of single requests, each model by itself on the fewest GPUs."""
    models = {name: fleet_model(name, size) for name, size in scenario.sizes.items()}
    units = tuple(
        placed_unit(name, 0, ALONE_ON[size], {name: (models[name], 1.0, 1.0, 1.0)})
        for name, size in scenario.sizes.items()
    )
    return AloneSimulation(units_of(Placement(scenario.cluster, units), models, mode_of("spatial")), latency)


def figures(summary: Summary, scale: float = 8.0) -> dict[str, Any]:
    """What the paper plots."""
    overall = summary.overall
    met = overall.attainment.get("latency", [0.0] * len(SLO_SCALES))

    def p99(distribution: Any) -> float | None:
        return None if distribution is None else round(distribution.p99, 4)

    return {
        "throughput": round(summary.weighted_throughput_own_span or 0.0, 4),
        "requests_per_second": round(overall.requests_per_second or 0.0, 3),
        "slo_attainment": round(met[SLO_SCALES.index(scale)], 4),
        "slo_attainment_by_scale": dict(zip(map(str, SLO_SCALES), (round(m, 4) for m in met), strict=True)),
        "p99_latency_per_token": p99(overall.latency_per_token),
        "p99_ttft": p99(overall.ttft),
        "p99_tpot": p99(overall.tpot),
        "failed": overall.requests - overall.completed,
    }


__all__ = ["SLO_SCALES", "Scenario", "alone", "authors_spatial", "costs", "figures", "place", "run", "synthetic"]


def by_hand(
    sizes: Sequence[str], rates: Sequence[float], gpus: int, shares: Sequence[tuple[float, float]]
) -> tuple[Scenario, Placement]:
    """All models on one mesh of `gpus`, with (prefill, decode) shares."""
    names = [f"{size}-{i}" for i, size in enumerate(sizes)]
    scenario = Scenario(dict(zip(names, sizes, strict=True)), dict(zip(names, rates, strict=True)), (gpus,))
    members = {
        name: (fleet_model(name, size), rate, *share)
        for name, size, rate, share in zip(names, sizes, rates, shares, strict=True)
    }
    return scenario, Placement(scenario.cluster, (placed_unit("unit0", 0, gpus, members),))
