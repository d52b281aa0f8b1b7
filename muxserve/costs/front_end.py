"""What the tokens of a job cost outside of the engine, where that runs on the same cores.

On a machine without GPUs gateway and unit scheduler share the cores with the engines. A job that computes tokens faster
keeps them busier, so their work is part of what it brings (`Load.brought`): beside each other, jobs and that work then
ask for more than there is, and the jobs stretch (`costs.interference`). What a request costs before it is in a queue,
and a lease when an engine gets one, comes with no job: whoever runs then is slowed by it.

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

# What is expected before anything was measured, in core-seconds: for a request, a step of an engine, a token and a
# lease, the client's work included (two cores of a virtual machine at 2 to 3 GHz, `benchmarks/sim_vs_live.py`).
_EXPECTED = (7.5e-3, 0.4e-3, 0.09e-3, 0.7e-3)
# Standard deviations of the factors of these: of what they have in common, since machines are faster or slower, and of
# each one's own.
_COMMON, _OWN = 0.7, 0.3
# What the machine does anyway, beyond what intervals without steps have shown: core-seconds per second, and the
# standard deviation of the factor of that.
_BACKGROUND, _BACKGROUND_OWN = 0.02, 0.5
# An engine that gives way to the front end waits for longer than that takes: the kernel does not move it at once to
# a core that is idle by then. How many times as long, by the step times of the quickstart's eager fleet at 30, 60 and
# 90 % of its capacity: simulated with 1 they were up to 4 % too short, and with 1.12 up to 5 % too long.
_INTERRUPTION_COST = 1.06
# A decode job waits for that less than a prefill job beside it, which comes to a core where the front end was alone. By
# the kernel's counts a prefill waited for 30 to 32 % of what it computed, and the decode beside it for 16 to 17 %
# (quickstart, eager, at 30, 60 and 90 % of the capacity).
DECODE_WAITS = 0.53
# Of an observation whose work is a core-second, relatively; and how many such observations are remembered.
_NOISE, _MEMORY = 0.2, 30.0
# What the machine does anyway is the least of about so many intervals without steps.
_IDLE_INTERVALS = 10.0


@dataclass(frozen=True, slots=True)
class FrontEndWork:
    """Seconds of the whole device per request, when it comes (`request`), per token that is emitted (`token`), per
    step, whose tokens come in one message (`step`), and per lease of an engine that had none (`lease`)."""

    request: float
    token: float
    step: float = 0.0
    lease: float = 0.0

    def seconds(self, tokens: int) -> float:
        """What a step brings that emits so many tokens."""
        return self.step + tokens * self.token

    def loaded(self, load: Load, tokens: int, seconds: float, waits: float = 1.0) -> Load:
        """The load of a step that emits so many tokens, and takes so long alone, with what it brings; it `waits` so
        much for such work."""
        return load._replace(brought=load.brought + self.seconds(tokens) / seconds, waits=waits)

    def overheads(self, cores: int) -> Overheads:
        """A profile's, where the seconds are a core's of so many."""
        return Overheads(
            request_work=self.request / cores,
            token_work=self.token / cores,
            step_work=self.step / cores,
            lease_work=self.lease / cores,
        )

    def of_stage(self, stages: int) -> FrontEndWork:
        """What each of an engine's stages brings: a micro-batch, which goes through all of them, has one answer."""
        return FrontEndWork(self.request / stages, self.token / stages, self.step / stages, self.lease)


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
        load, seconds = self.costs.decode_load(batch, context), self.costs.decode(batch, context).seconds(context)
        return self.work.loaded(load, batch, seconds, DECODE_WAITS)


def with_front_end(latency: LatencyModel, overheads: Overheads | None) -> LatencyModel:
    """`latency`, and what engines lose to the front end's work where some was measured."""
    if overheads is None:
        return latency
    work = overheads.request_work, overheads.token_work, overheads.step_work, overheads.lease_work
    if not any(work):
        return latency
    return FrontEnd(latency, FrontEndWork(*(_INTERRUPTION_COST * each for each in work)))


def apart(latency: LatencyModel) -> tuple[LatencyModel, FrontEndWork | None]:
    """What engines cost that nothing stretches, and the front end's work where `latency` has some."""
    return (latency.latency, latency.work) if isinstance(latency, FrontEnd) else (latency, None)


class FrontEndUse(NamedTuple):
    """What happened in `seconds`: cores were busy for `core_seconds` with something else than engines, while so many
    requests came, engines took so many steps, so many tokens were emitted, and engines that had no lease got so many.
    """

    seconds: float
    core_seconds: float
    requests: int
    steps: int
    tokens: int
    leases: int = 0


class FrontEndLearner:
    """Learns the front end's work from how busy the cores of its machine are beside steps, by recursive least squares
    (`costs.least_squares`) over intervals of some seconds. Its parts are requests, steps, tokens and leases. Their
    factors beside what is expected move together at first, and apart as far as intervals of different mixtures tell.

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
        request, step, token, lease = (factor * each for factor, each in zip(factors, _EXPECTED, strict=True))
        return FrontEndWork(request, token, step, lease)
