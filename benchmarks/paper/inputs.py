"""What the paper's experiments have in common: A100 costs, the LLaMA models, memory.

The step times that MuxServe's authors measured on A100-80GB are not part of this repository. Their file
(`examples/placement` of the MuxServe repository) is named by the environment variable MUXSERVE_A100_PROFILE; without it
the roofline, which was fitted to a part of it, stands in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from muxserve.costs import Decode, EngineCosts, EngineShape, LatencyModel, Load, ModelArchitecture
from muxserve.costs.devices import device
from muxserve.costs.llama_tables import read_llama_tables
from muxserve.costs.measured import ProfileModel
from muxserve.costs.roofline import Roofline
from placement.cluster import PlacedModel, PlacedUnit
from placement.demand import Demand
from placement.memory import MemoryRules, model_bytes

DEVICE = "A100-80GB"
PROFILE = "MUXSERVE_A100_PROFILE"
DTYPE = "float16"


def costs() -> tuple[LatencyModel, str]:
    """The latency model of A100s, and where it comes from."""
    path = os.environ.get(PROFILE)
    if path is None:
        return Roofline(), f"roofline ({PROFILE} is not set)"
    return ProfileModel(read_llama_tables(path), beyond=Roofline()), "measured step times of A100-80GB"


def llama(size: str) -> ModelArchitecture:
    """LLaMA (2023) of 7b, 13b, 30b or 65b."""
    layers, heads, hidden, intermediate = {
        "7b": (32, 32, 4096, 11008),
        "13b": (40, 40, 5120, 13824),
        "30b": (60, 52, 6656, 17920),
        "65b": (80, 64, 8192, 22016),
    }[size]
    return ModelArchitecture(
        name="LlamaForCausalLM",
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        hidden=hidden,
        intermediate=intermediate,
        vocab=32000,
        max_len=2048,
        default_max_len=2048,
        dtype=DTYPE,
    )


def fleet_model(name: str, size: str, max_num_seqs: int = 256) -> Demand:
    """A model as the simulator takes it."""
    return Demand(name, llama(size), DTYPE, max_num_seqs=max_num_seqs)


def placed_unit(name: str, first: int, size: int, members: Mapping[str, tuple[float, float, float]]) -> PlacedUnit:
    """A unit of `size` GPUs numbered from `first`; per model its rate, prefill share and decode share.

    Raises:
        ValueError: the weights leave no room for KV.
    """
    rules = MemoryRules()
    whole = device(DEVICE).memory_bytes * rules.utilisation
    taken = sum(
        model_bytes(Demand(n, m.architecture, m.dtype, m.max_num_seqs, rate=rate), size, rules)
        for n, (m, rate, _, _) in members.items()
    )
    if taken >= whole:
        raise ValueError(f"{', '.join(members)} do not fit {size} GPUs")
    placed = tuple(PlacedModel(n, rate, prefill, decode) for n, (_, rate, prefill, decode) in members.items())
    return PlacedUnit(name, DEVICE, tuple(range(first, first + size)), placed, int(whole - taken))


class Stretched:
    """A latency model whose steps take `factor` times as long, the rest of the time the device being idle.

    MuxServe's step times were measured around the model's forward pass. Its runs of 2023 also paid for scheduling,
    sampling and one message per step and worker, while the GPU waited.
    """

    def __init__(self, device: LatencyModel, factor: float) -> None:
        self._device = device
        self._factor = factor

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> StretchedCosts:
        """Costs of that engine with its host."""
        return StretchedCosts(self._device.engine(architecture, shape), self._factor)

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        """That of the device."""
        return self._device.slowdowns(device, loads)


class StretchedCosts:
    """`EngineCosts` of a stretched engine; its loads are lower, since the device waits for the host in between."""

    def __init__(self, device: EngineCosts, factor: float) -> None:
        self._device = device
        self._factor = factor

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """Seconds of a prefill step."""
        return self._device.prefill(tokens, pairs, sequences) * self._factor

    def decode(self, batch: int, context: int) -> Decode:
        """One decode step."""
        step = self._device.decode(batch, context)
        return step._replace(fixed=step.fixed * self._factor, per_token=step.per_token * self._factor)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        """Load on the device, over the whole step."""
        return self._diluted(self._device.prefill_load(tokens, pairs, sequences))

    def decode_load(self, batch: int, context: int) -> Load:
        """Load on the device, over the whole step."""
        return self._diluted(self._device.decode_load(batch, context))

    def _diluted(self, load: Load) -> Load:
        return Load(load.bandwidth / self._factor, load.compute / self._factor)
