"""What the stages of a pipeline cost: parts of a model's layers, each on a shape of its own. The simulator's pipelines
and those of `muxserve deploy --simulated` ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.kernels import KernelCosts
from muxserve.costs.latency import Decode, EngineCosts, EngineShape, LatencyModel, Load
from muxserve.costs.measured import MeasuredCosts


def costs_of_stages(
    split: Sequence[int], latency: LatencyModel, architecture: ModelArchitecture, shape: EngineShape
) -> list[EngineCosts]:
    """The costs of each stage; `split` says how many layers each has.

    Profiles and kernel tables have whole models: of those a stage takes the part that its layers are of all. Costs from
    first principles know what a stage is.

    Raises:
        CostError: the latency model does not know a part of the model on that device.
    """
    whole = latency.engine(architecture, shape)
    if isinstance(whole, MeasuredCosts) and len(split) > 1:
        return [PartOfCosts(whole, layers / architecture.layers) for layers in split]
    if isinstance(whole, KernelCosts) and len(split) > 1:
        return [whole.of_stage(part) for part in stage_architectures(architecture, split)]
    return [latency.engine(part, shape) for part in stage_architectures(architecture, split)]


def stage_architectures(architecture: ModelArchitecture, split: Sequence[int]) -> list[ModelArchitecture]:
    """The model's parts as models of their own. Only the last computes logits; looking up embeddings costs nothing.
    Layers with a window are spread evenly."""
    windowed = architecture.windowed_layers / architecture.layers
    return [
        replace(
            architecture,
            layers=layers,
            windowed_layers=round(windowed * layers),
            vocab=architecture.vocab if number == len(split) - 1 else 0,
        )
        for number, layers in enumerate(split)
    ]


@dataclass(frozen=True, slots=True)
class PartOfCosts:
    """`EngineCosts` of a part of a model's layers."""

    costs: EngineCosts
    part: float

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """See `EngineCosts.prefill`."""
        return self.part * self.costs.prefill(tokens, pairs, sequences)

    def decode(self, batch: int, context: int) -> Decode:
        """See `EngineCosts.decode`."""
        whole = self.costs.decode(batch, context)
        return Decode(self.part * whole.fixed, self.part * whole.per_token, whole.until)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        """See `EngineCosts.prefill_load`."""
        return self.costs.prefill_load(tokens, pairs, sequences)

    def decode_load(self, batch: int, context: int) -> Load:
        """See `EngineCosts.decode_load`."""
        return self.costs.decode_load(batch, context)
