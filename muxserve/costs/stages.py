"""What the stages of a pipeline cost: parts of a model's layers, each on a shape of its own. The simulator's pipelines
and those of `muxserve deploy --simulated` ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.kernels import KernelCosts
from muxserve.costs.latency import EngineCosts, EngineShape, LatencyModel
from muxserve.costs.measured import MeasuredCosts
from muxserve.costs.slower import ScaledCosts, Slower


def costs_of_stages(
    split: Sequence[int], latency: LatencyModel, architecture: ModelArchitecture, shape: EngineShape
) -> list[EngineCosts]:
    """The costs of each stage; `split` says how many layers each has.

    Profiles and kernel tables have whole models: of those a stage takes the part that its layers are of all. Costs from
    first principles know what a stage is.

    Raises:
        CostError: the latency model does not know a part of the model on that device.
    """
    if isinstance(latency, Slower):
        stages = costs_of_stages(split, latency.latency, architecture, shape)
        return [ScaledCosts(stage, latency.factor) for stage in stages]
    whole = latency.engine(architecture, shape)
    if isinstance(whole, MeasuredCosts) and len(split) > 1:
        return [ScaledCosts(whole, layers / architecture.layers) for layers in split]
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
