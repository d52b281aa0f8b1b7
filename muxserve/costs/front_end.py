"""What the tokens of a job cost outside of the engine, where that runs on the same cores.

On a machine without GPUs gateway and unit scheduler share the cores with the engines. A job that computes tokens faster
keeps them busier, so their work is counted as part of the load of the job that brings it: beside each other, jobs then
ask for more than there is, and all of them stretch (`costs.interference`).
"""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.latency import Decode, EngineCosts, EngineShape, LatencyModel, Load
from muxserve.costs.profile import Overheads


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A `LatencyModel` whose jobs bring work for the front end with them: seconds of the whole device per prompt
    (`request`), per token that is emitted (`token`) and per step, whose tokens come in one message (`step`)."""

    latency: LatencyModel
    request: float
    token: float
    step: float = 0.0

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> EngineCosts:
        """See `LatencyModel.engine`."""
        return _WithFrontEnd(self.latency.engine(architecture, shape), self.request, self.token, self.step)

    def slowdown(self, device: str, mine: Load, others: tuple[Load, ...]) -> float:
        """See `LatencyModel.slowdown`."""
        return self.latency.slowdown(device, mine, others)


@dataclass(frozen=True, slots=True)
class _WithFrontEnd:
    costs: EngineCosts
    request: float
    token: float
    step: float

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        return self.costs.prefill(tokens, pairs, sequences)

    def decode(self, batch: int, context: int) -> Decode:
        return self.costs.decode(batch, context)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        load = self.costs.prefill_load(tokens, pairs, sequences)
        work = self.step + sequences * (self.request + self.token)
        return Load(load.bandwidth, load.compute + work / self.costs.prefill(tokens, pairs, sequences))

    def decode_load(self, batch: int, context: int) -> Load:
        load = self.costs.decode_load(batch, context)
        seconds = self.costs.decode(batch, context).seconds(context)
        return Load(load.bandwidth, load.compute + (self.step + batch * self.token) / seconds)


def with_front_end(latency: LatencyModel, overheads: Overheads | None) -> LatencyModel:
    """`latency`, and the front end's work where some was measured."""
    if overheads is None or not (overheads.request_work or overheads.token_work or overheads.step_work):
        return latency
    return FrontEnd(latency, overheads.request_work, overheads.token_work, overheads.step_work)


def engines_only(latency: LatencyModel) -> LatencyModel:
    """`latency` without the front end's work: what engines cost that nothing stretches."""
    return latency.latency if isinstance(latency, FrontEnd) else latency
