"""What the tokens of a job cost outside of the engine, where that runs on the same cores.

On a machine without GPUs gateway and unit scheduler share the cores with the engines. A job that computes tokens faster
keeps them busier, so their work is part of what it brings (`Load.brought`): beside each other, jobs and that work then
ask for more than there is, and the jobs stretch (`costs.interference`). What a request costs before it is in a queue
comes with no job: whoever runs then is slowed by it.

How much it is depends on the machine, and is learnt while a fleet serves (`FrontEndLearner`): the kernel says how busy
the cores were, and what engines did not take is the front end's, and that of clients on the same cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.latency import Decode, EngineCosts, EngineShape, LatencyModel, Load
from muxserve.costs.least_squares import RecursiveLeastSquares
from muxserve.costs.profile import Overheads

# What is expected before anything was measured, in core-seconds: for a request, a step of an engine and a token, the
# client's work included (two cores of a virtual machine at 2 to 3 GHz, `benchmarks/sim_vs_live.py`).
_EXPECTED = (9e-3, 0.4e-3, 0.09e-3)
# Standard deviations of the factors of these: of what they have in common, since machines are faster or slower, and of
# each one's own.
_COMMON, _OWN = 0.7, 0.3
# What the machine does anyway, beyond what intervals without steps have shown: core-seconds per second, and the
# standard deviation of the factor of that.
_BACKGROUND, _BACKGROUND_OWN = 0.02, 0.5
# An engine that gives way to the front end waits for longer than that takes: the kernel does not move it at once to
# a core that is idle by then. How many times as long, by the kernel's count of the waiting of the quickstart's engines
# while both of two cores were leased (the median of 33 intervals of 4 s; 1.0 to 1.25 in 27 of them).
_INTERRUPTION_COST = 1.12
# Of an observation whose work is a core-second, relatively; and how many such observations are remembered.
_NOISE, _MEMORY = 0.2, 30.0
# What the machine does anyway is the least of about so many intervals without steps.
_IDLE_INTERVALS = 10.0


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
        return Load(load.bandwidth, load.compute, load.brought + self.seconds(tokens) / seconds, load.friction)

    def overheads(self, cores: int) -> Overheads:
        """A profile's, where the seconds are a core's of so many."""
        return Overheads(request_work=self.request / cores, token_work=self.token / cores, step_work=self.step / cores)

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

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        """See `LatencyModel.slowdowns`."""
        return self.latency.slowdowns(device, loads)


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
    """`latency`, and what engines lose to the front end's work where some was measured."""
    if overheads is None or not (overheads.request_work or overheads.token_work or overheads.step_work):
        return latency
    work = overheads.request_work, overheads.token_work, overheads.step_work
    return FrontEnd(latency, FrontEndWork(*(_INTERRUPTION_COST * each for each in work)))


def apart(latency: LatencyModel) -> tuple[LatencyModel, FrontEndWork | None]:
    """What engines cost that nothing stretches, and the front end's work where `latency` has some."""
    return (latency.latency, latency.work) if isinstance(latency, FrontEnd) else (latency, None)


class FrontEndUse(NamedTuple):
    """What happened in `seconds`: cores were busy for `core_seconds` with something else than engines, while so many
    requests came, engines took so many steps, and so many tokens were emitted."""

    seconds: float
    core_seconds: float
    requests: int
    steps: int
    tokens: int


class FrontEndLearner:
    """Learns the front end's work from how busy the cores of its machine are beside steps, by recursive least squares
    (`costs.least_squares`) over intervals of some seconds. Its parts are requests, steps and tokens. Their factors
    beside what is expected move together at first, and apart as far as intervals of different mixtures tell.

    What the machine does anyway is known from intervals without steps, once there were some with steps, since a fleet
    that starts keeps all cores busy. It is the least of them: what comes and goes, as a client that starts, does not
    run beside engines all the time. A fleet that is always asked has no such intervals, so the time is one more part.
    """

    def __init__(self) -> None:
        parts = range(len(_EXPECTED))
        covariance = [[_COMMON**2 + (_OWN**2 if i == j else 0.0) for j in parts] + [0.0] for i in parts]
        covariance.append([*(0.0 for _ in parts), _BACKGROUND_OWN**2])
        self._learnt = RecursiveLeastSquares([1.0 for _ in covariance], covariance, _NOISE, _MEMORY)
        # Core-seconds per second.
        self._idle = 0.0

    def observe(self, use: FrontEndUse) -> None:
        """So it was in an interval."""
        if not use.steps:
            self._observe_idle(use)
            return
        parts = [each * count for each, count in zip((*_EXPECTED, _BACKGROUND), (*use[2:], use.seconds), strict=True)]
        whole = sum(parts)
        own = max(0.0, use.core_seconds - self._idle * use.seconds)
        # An interval of little work is mostly what the kernel's counts miss.
        self._learnt.observe([part / whole for part in parts], own / whole, whole)

    def _observe_idle(self, use: FrontEndUse) -> None:
        if use.seconds > 0.0 and self._learnt.observations:
            rate = use.core_seconds / use.seconds
            self._idle = min(rate, self._idle + (rate - self._idle) / _IDLE_INTERVALS)

    @property
    def work(self) -> FrontEndWork | None:
        """Core-seconds as of the last interval; None before the first with steps."""
        if not self._learnt.observations:
            return None
        *factors, _ = self._learnt.coefficients
        request, step, token = (factor * each for factor, each in zip(factors, _EXPECTED, strict=True))
        return FrontEndWork(request, token, step)
