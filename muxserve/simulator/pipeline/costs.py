"""What a latency model that was measured on whole models says of a pipeline's stages."""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.latency import Decode, EngineCosts, EngineShape, LatencyModel, Load
from muxserve.costs.measured import MeasuredCosts


@dataclass(frozen=True, slots=True)
class StageCosts:
    """A `LatencyModel` of the stages of one model. Profiles have whole models: of those a stage takes the part that its
    layers are of all. Costs from first principles know what a stage is."""

    latency: LatencyModel
    whole: ModelArchitecture

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> EngineCosts:
        """See `LatencyModel.engine`."""
        costs = self.latency.engine(self.whole, shape)
        if isinstance(costs, MeasuredCosts) and architecture.layers != self.whole.layers:
            return _Part(costs, architecture.layers / self.whole.layers)
        return self.latency.engine(architecture, shape)

    def slowdown(self, device: str, mine: Load, others: tuple[Load, ...]) -> float:
        """See `LatencyModel.slowdown`."""
        return self.latency.slowdown(device, mine, others)


@dataclass(frozen=True, slots=True)
class _Part:
    costs: EngineCosts
    part: float

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        return self.part * self.costs.prefill(tokens, pairs, sequences)

    def decode(self, batch: int, context: int) -> Decode:
        whole = self.costs.decode(batch, context)
        return Decode(self.part * whole.fixed, self.part * whole.per_token, whole.until)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        return self.costs.prefill_load(tokens, pairs, sequences)

    def decode_load(self, batch: int, context: int) -> Load:
        return self.costs.decode_load(batch, context)
