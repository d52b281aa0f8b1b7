"""Any costs, but slower: for what becomes of a plan if steps take longer than predicted."""

from __future__ import annotations

from collections.abc import Sequence

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.latency import Decode, EngineCosts, EngineShape, LatencyModel, Load


class Slower:
    """A `LatencyModel` whose steps take `factor` times as long as those of `latency`."""

    def __init__(self, latency: LatencyModel, factor: float) -> None:
        self.latency, self.factor = latency, factor

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> EngineCosts:
        """See `LatencyModel.engine`."""
        return ScaledCosts(self.latency.engine(architecture, shape), self.factor)

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        """See `LatencyModel.slowdowns`."""
        return self.latency.slowdowns(device, loads)


class ScaledCosts:
    """`EngineCosts` of steps that take `factor` times as long, and ask as much of the device meanwhile."""

    def __init__(self, costs: EngineCosts, factor: float) -> None:
        self._costs, self._factor = costs, factor

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """See `EngineCosts.prefill`."""
        return self._factor * self._costs.prefill(tokens, pairs, sequences)

    def decode(self, batch: int, context: int) -> Decode:
        """See `EngineCosts.decode`."""
        step = self._costs.decode(batch, context)
        return Decode(self._factor * step.fixed, self._factor * step.per_token, step.until)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        """See `EngineCosts.prefill_load`."""
        return self._costs.prefill_load(tokens, pairs, sequences)

    def decode_load(self, batch: int, context: int) -> Load:
        """See `EngineCosts.decode_load`."""
        return self._costs.decode_load(batch, context)
