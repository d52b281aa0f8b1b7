"""What the tokens of a job cost outside of the engine, where that runs on the same cores.

On a machine without GPUs gateway and unit scheduler share the cores with the engines. A job that computes tokens faster
keeps them busier, so their work is part of what it brings (`Load.brought`): beside each other, jobs and that work then
ask for more than there is, and the jobs stretch (`costs.interference`). What a request costs before it is in a queue
comes with no job: whoever runs then is slowed by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.latency import Decode, EngineCosts, EngineShape, LatencyModel, Load
from muxserve.costs.profile import Overheads


@dataclass(frozen=True, slots=True)
class FrontEndWork:
    """Seconds of the whole device per request, when it comes (`request`), per token that is emitted (`token`) and per
    step, whose tokens come in one message (`step`)."""

    request: float
    token: float
    step: float = 0.0

    def seconds(self, tokens: int) -> float:
        """What a step brings that emits so many tokens."""
        return self.step + tokens * self.token

    def loaded(self, load: Load, tokens: int, seconds: float) -> Load:
        """The load of a step that emits so many tokens, and takes so long alone, with what it brings."""
        return Load(load.bandwidth, load.compute, load.brought + self.seconds(tokens) / seconds)

    def of_stage(self, stages: int) -> FrontEndWork:
        """What each of an engine's stages brings: a micro-batch, which goes through all of them, has one answer."""
        return FrontEndWork(self.request / stages, self.token / stages, self.step / stages)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A `LatencyModel` whose jobs bring work for the front end with them."""

    latency: LatencyModel
    work: FrontEndWork

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> EngineCosts:
        """See `LatencyModel.engine`."""
        return _WithFrontEnd(self.latency.engine(architecture, shape), self.work)

    def slowdown(self, device: str, mine: Load, others: tuple[Load, ...]) -> float:
        """See `LatencyModel.slowdown`."""
        return self.latency.slowdown(device, mine, others)


@dataclass(frozen=True, slots=True)
class _WithFrontEnd:
    costs: EngineCosts
    work: FrontEndWork

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        return self.costs.prefill(tokens, pairs, sequences)

    def decode(self, batch: int, context: int) -> Decode:
        return self.costs.decode(batch, context)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        load = self.costs.prefill_load(tokens, pairs, sequences)
        return self.work.loaded(load, sequences, self.costs.prefill(tokens, pairs, sequences))

    def decode_load(self, batch: int, context: int) -> Load:
        load = self.costs.decode_load(batch, context)
        return self.work.loaded(load, batch, self.costs.decode(batch, context).seconds(context))


def with_front_end(latency: LatencyModel, overheads: Overheads | None) -> LatencyModel:
    """`latency`, and the front end's work where some was measured."""
    if overheads is None or not (overheads.request_work or overheads.token_work or overheads.step_work):
        return latency
    return FrontEnd(latency, FrontEndWork(overheads.request_work, overheads.token_work, overheads.step_work))


def apart(latency: LatencyModel) -> tuple[LatencyModel, FrontEndWork | None]:
    """What engines cost that nothing stretches, and the front end's work where `latency` has some."""
    return (latency.latency, latency.work) if isinstance(latency, FrontEnd) else (latency, None)
