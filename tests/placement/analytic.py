"""A small latency model whose answers can be checked by hand, models of four sizes, and fleets of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from muxserve.costs.architecture import ITEM_BYTES, ModelArchitecture
from muxserve.costs.latency import CostError, Decode, EngineShape, Load
from placement.candidates import Candidates
from placement.cluster import Cluster, Node
from placement.demand import Demand
from placement.engines import Engines
from placement.estimator import Estimator
from tests.costs.models import llama

GIB = 1 << 30
MEMORY = {"big": 80 * GIB, "small": 24 * GIB}
FLOPS = {"big": 200e12, "small": 60e12}
BANDWIDTH = {"big": 1.6e12, "small": 0.5e12}
LAUNCH = 2e-3
HOP = 20e-6


@dataclass(frozen=True)
class AnalyticCosts:
    """A step takes what its operations or its bytes take, whichever is more, and a constant."""

    architecture: ModelArchitecture
    shape: EngineShape

    @property
    def weights(self) -> float:
        return self.architecture.parameters * ITEM_BYTES[self.shape.dtype] / self.shape.tp

    @property
    def flops(self) -> float:
        return FLOPS[self.shape.device] * self.shape.share

    @property
    def bandwidth(self) -> float:
        # Half of the compute moves all that the memory has.
        return BANDWIDTH[self.shape.device] * min(1.0, 2 * self.shape.share)

    @property
    def constant(self) -> float:
        return LAUNCH + (2 * self.architecture.layers * HOP if self.shape.tp > 1 else 0.0)

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        a = self.architecture
        operations = 2 * a.parameters * tokens + 4 * a.layers * a.heads * a.head_dim * pairs
        return max(operations / self.shape.tp / self.flops, self.weights / self.bandwidth) + self.constant

    def decode(self, batch: int, context: int) -> Decode:
        a = self.architecture
        linear = max(self.weights / self.bandwidth, 2 * a.parameters * batch / self.shape.tp / self.flops)
        per_token = a.kv_bytes_per_token(self.shape.dtype) / self.shape.tp / self.bandwidth
        return Decode(linear + self.constant, per_token)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        return Load(self.weights / BANDWIDTH[self.shape.device] / self.prefill(tokens, pairs, sequences), 0.8)

    def decode_load(self, batch: int, context: int) -> Load:
        moved = self.weights + context * self.architecture.kv_bytes_per_token(self.shape.dtype) / self.shape.tp
        seconds = self.decode(batch, context).seconds(context)
        return Load(min(1.0, moved / BANDWIDTH[self.shape.device] / seconds), 0.1)


class Analytic:
    """`least_share`: the smallest share whose costs are known."""

    def __init__(self, least_share: float = 0.0, interference: bool = True) -> None:
        self.least_share, self.interference = least_share, interference
        self.asked: list[EngineShape] = []

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> AnalyticCosts:
        self.asked.append(shape)
        if shape.device not in FLOPS or shape.share < self.least_share:
            raise CostError(f"nothing is known of {shape.device} with {shape.share:.0%} of its compute")
        return AnalyticCosts(architecture, shape)

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        asked = sum(load.bandwidth for load in loads)
        return [max(1.0, asked) if self.interference else 1.0] * len(loads)


B7 = llama(name="7b", layers=32, heads=32, kv_heads=32, hidden=4096, intermediate=11008)
B13 = llama(name="13b", layers=40, heads=40, kv_heads=40, hidden=5120, intermediate=13824)
B30 = llama(name="30b", layers=60, heads=52, kv_heads=52, hidden=6656, intermediate=17920)
B65 = llama(name="65b", layers=80, heads=64, kv_heads=64, hidden=8192, intermediate=22016)


def demand(name: str, architecture: ModelArchitecture = B7, rate: float = 1.0, **more: object) -> Demand:
    fields: dict[str, object] = {"prompt_tokens": 161, "output_tokens": 338, "dtype": "float16"}
    return Demand(name, architecture, rate=rate, **(fields | more))  # type: ignore[arg-type]


def estimator(demands: list[Demand], least_share: float = 0.0, interference: bool = True) -> Estimator:
    engines = Engines(demands, Analytic(least_share, interference), MEMORY)
    return Estimator(Candidates(engines))


def cluster(*nodes: tuple[str, int]) -> Cluster:
    return Cluster(tuple(Node(device, count) for device, count in nodes))


def random_fleet(seed: int, models: int, rate: float, alpha: float = 1.3) -> list[Demand]:
    """`models` of the four sizes, small ones more often, with power-law rates of `rate` in the mean."""
    rng = random.Random(seed)
    sizes = rng.choices([B7, B13, B30, B65], weights=[12, 4, 2, 1], k=models)
    weights = [(i + 1) ** -alpha for i in range(models)]
    rng.shuffle(weights)
    scale = rate * models / sum(weights)
    return [demand(f"m{i}", size, weight * scale) for i, (size, weight) in enumerate(zip(sizes, weights, strict=True))]
