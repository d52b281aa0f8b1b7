"""What a unit can serve: its steady state, latencies, SLO attainment and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from muxserve.costs.latency import Load
from placement.candidates import MEETS, Candidates, most_sequences
from placement.demand import Demand, Member, Members, Mesh
from placement.settle import Runner, Steady, settle

HORIZON = 60.0  # seconds of overload after which attainment is told
# Simulated TPOTs of loaded units are up to a tenth above the estimate: prefill comes in bursts.
_MARGIN = 1.1
_STEP = 1.2


def waiting(runners: Sequence[Runner], state: Steady) -> float:
    """Mean seconds that a request waits for prefill: Pollaczek-Khinchine for the queue of all models, where prompts of
    each model spread as an exponential distribution does (the mean square of their times is twice the squared mean)."""
    busy = min(state.prefill, 0.999)
    square = 0.0
    for runner, rate, batch in zip(runners, state.rates, state.batches, strict=True):
        seconds = runner.prefill.seconds_at(batch) * runner.prefill_stretch
        square += rate * seconds * seconds
    return square / (1.0 - busy)


class ServiceLevel(NamedTuple):
    """How soon a replica serves. Latencies are means in seconds; `ttft` is infinite where more is asked than can be
    served, `tpot` None where an answer has one token or is a vector. `attainment` is the part of requests that meets
    the objectives (that is answered, where there are none)."""

    ttft: float
    tpot: float | None
    attainment: float


class ReplicaMemory(NamedTuple):
    """Bytes of a replica on each device: its `own`, without KV, and `kv` that is in use on average."""

    own: int
    kv: float


def service_level(
    demand: Demand, runner: Runner, batch: float, rate: float, state: Steady, wait: float
) -> ServiceLevel:
    """How soon one model's requests are served.

    The wait for prefill is taken as exponential with probability U of not being zero. The batch is taken as normal; its
    variance is the mean, as of a Poisson distribution, over the elasticity of capacity in the batch: where larger
    batches hardly serve more, a few requests too many stay for long. TPOT gets a margin of a tenth. Where only
    a part r of the rate is served, the wait after t seconds is t (1 - r) / r, told for the first `HORIZON` seconds.
    """
    prefill = runner.prefill.seconds_at(1.0) * runner.prefill_stretch
    step = runner.decode.seconds_at(batch) * runner.decode_stretch / max(state.progress, 1e-9)
    served = rate / runner.rate
    met = served >= MEETS
    ttft = wait + prefill if met else math.inf
    attainment = min(1.0, served) if not met else 1.0
    if demand.slo_ttft is not None:
        slack = demand.slo_ttft - prefill
        if slack <= 0:
            in_time = 0.0
        else:
            busy = state.prefill
            in_time = 1.0 - busy * math.exp(-slack * busy / wait) if wait > 0 and busy > 0 else 1.0
            if not met:
                in_time *= min(1.0, slack * served / ((1.0 - served) * HORIZON))
        attainment = min(attainment, in_time)
    if demand.slo_tpot is not None and demand.decode_steps > 0:
        within = runner.decode.batch_within(demand.slo_tpot / _MARGIN * state.progress / runner.decode_stretch)
        if within < 1.0:
            attainment = 0.0
        elif within < runner.decode.batch[-1]:
            attainment *= _normal((within + 0.5 - batch) / _deviation(runner, batch))
    return ServiceLevel(ttft, step if demand.decode_steps else None, attainment)


def _deviation(runner: Runner, batch: float) -> float:
    """Standard deviation of the batch."""
    capacity = runner.decode.capacity_at(batch)
    elasticity = (runner.decode.capacity_at(_STEP * batch) / capacity - 1.0) / (_STEP - 1.0)
    return math.sqrt(max(batch, 0.25) / max(elasticity, 0.05))


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


LEAST_PREFILL_SHARE = 0.3
_MOST_HEADROOM = 64.0
_NEGLIGIBLE = 1.005  # a slowdown below this is not worth settling again


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """A replica in a unit.

    `rate` is asked of it, `throughput` served, both in requests per second. `limit` is what holds the replica back, or
    would next: "memory", "compute", "slo", "sequences" (`max_num_seqs`), or "batch" where that is vLLM's default.
    """

    member: Member
    rate: float
    throughput: float
    batch: float
    level: ServiceLevel
    decode_share: float
    limit: str
    memory: ReplicaMemory

    @property
    def meets_rate(self) -> bool:
        """It serves what is asked, within a hundredth."""
        return self.throughput >= MEETS * self.rate


class UnitLoad(NamedTuple):
    """How busy a unit is: `prefill` is the part of time in which a prefill runs, `decode` the compute that decode asks
    for (above 1: it takes turns), `progress` the part of its full speed at which it goes on."""

    prefill: float
    decode: float
    progress: float


@dataclass(frozen=True, slots=True)
class UnitEstimate:
    """A unit. Each device has `pool_bytes` for pages, of which `kv_bytes` are in use on average. `headroom` is the
    factor by which all rates may grow before a model falls short, at most 64; `next_limit` is what it lacks then."""

    mesh: Mesh
    prefill_share: float
    models: tuple[ModelEstimate, ...]
    pool_bytes: int
    kv_bytes: float
    load: UnitLoad
    headroom: float = 1.0
    next_limit: str = ""

    @property
    def throughput(self) -> float:
        """Requests per second of all models."""
        return sum(model.throughput for model in self.models)

    @property
    def own_bytes(self) -> int:
        """Bytes of all models on each device, without KV."""
        return sum(model.memory.own for model in self.models)


class Shares(NamedTuple):
    """Shares of a unit's compute: of any prefill, and of each member's decode."""

    prefill: float
    decode: tuple[float, ...]


class Estimator:
    """Estimates units; depends on nothing but its candidates, and keeps nothing. Where engines take turns every job has
    all of the compute (temporal multiplexing)."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self.engines = candidates.engines
        self.demands = candidates.engines.demands

    def room(self, mesh: Mesh, members: Members) -> int:
        """Bytes that each device has for pages; negative if the weights alone do not fit."""
        own = sum(self.engines.footprint(member.model, mesh).own for member in members)
        return self.engines.memory[mesh.device] - own

    def choices(self, mesh: Mesh, members: Members, reserve: float = 1.0) -> list[Shares]:
        """Shares worth trying, from Algorithm 2's shares s: s with what they leave for prefill; everyone everything in
        turn; and where s leave too little, s scaled down so that a prefill fits beside them. Empty if a member cannot
        run there.

        All compute for a prefill and less for decode is tried for single models only: every prefill would wait until
        all decode engines have ended their steps, with the compute idle meanwhile.

        With a `reserve` s is for so many times the rates: the fewest SMs that meet a rate leave large batches.
        """
        whole = tuple(1.0 for _ in members)
        if self.engines.in_turns(mesh):
            fit = all(self.engines.fits(member.model, mesh) for member in members)
            return [Shares(1.0, whole)] if fit else []
        found = [self.candidates.of(member, mesh, reserve) for member in members]
        least = tuple(candidate.share for candidate in found if candidate is not None)
        if len(least) < len(members):
            return []
        choices = []
        left = 1.0 - sum(least) + 1e-9
        beside = max((share for share in self.candidates.shares if share <= left), default=0.0)
        if beside >= LEAST_PREFILL_SHARE:
            choices.append(Shares(beside, least))
        if len(least) == 1 and least != whole:
            choices.append(Shares(1.0, least))
        choices.append(Shares(1.0, whole))
        room = 1.0 - LEAST_PREFILL_SHARE
        if len(least) > 1 and sum(least) > room + 1e-9:
            grid = self.candidates.shares
            scaled = (share * room / sum(least) + 1e-9 for share in least)
            squeezed = tuple(max((s for s in grid if s <= share), default=grid[0]) for share in scaled)
            choices.append(Shares(LEAST_PREFILL_SHARE, squeezed))
        return choices

    def unit(self, mesh: Mesh, members: Members, shares: Shares) -> UnitEstimate | None:
        """The estimate of a unit with given shares; None if it does not fit or costs are not known."""
        settled = self.settled(mesh, members, shares)
        if settled is None:
            return None
        estimate = self._describe(mesh, members, shares, *settled)
        if not all(model.meets_rate for model in estimate.models):
            return estimate
        headroom, limit = self._headroom(mesh, members, shares)
        return replace(estimate, headroom=headroom, next_limit=limit)

    def _headroom(self, mesh: Mesh, members: Members, shares: Shares) -> tuple[float, str]:
        """How far all rates may grow together, and what is short beyond."""
        low, high, limit = 1.0, _MOST_HEADROOM, ""
        while high / low > 1.01:
            scale = math.sqrt(low * high)
            settled = self.settled(mesh, members, shares, scale)
            assert settled is not None, "it is possible at its own rates"
            estimate = self._describe(mesh, members, shares, *settled)
            short = [model for model in estimate.models if not model.meets_rate]
            if short:
                high, limit = scale, short[0].limit
            else:
                low = scale
        return low, limit

    def settled(
        self, mesh: Mesh, members: Members, shares: Shares, scale: float = 1.0
    ) -> tuple[list[Runner], Steady, int] | None:
        """Runners, steady state and pool bytes of a unit at `scale` times its rates; None as for `unit`."""
        pool = self.room(mesh, members)
        runners: list[Runner] = []
        sequences = 0.0
        for member, share in zip(members, shares.decode, strict=True):
            decode = self.engines.decode(member.model, mesh, share)
            prefill = self.engines.prefill(member.model, mesh, shares.prefill)
            if decode is None or prefill is None:
                return None
            demand = self.demands[member.model]
            sequence = self.engines.footprint(member.model, mesh).sequence
            sequences += sequence
            most = most_sequences(demand, decode)
            runners.append(Runner(scale * demand.rate / member.replicas, sequence, most, share, decode, prefill))
        if pool < sequences:
            return None
        state = settle(runners, shares.prefill, pool)
        stretched = self._stretched(mesh, runners, shares.prefill, state)
        if stretched is not None:
            runners = stretched
            state = settle(runners, shares.prefill, pool, max(state.progress, 0.01))
        return runners, state, pool

    def _stretched(self, mesh: Mesh, runners: list[Runner], prefill_share: float, state: Steady) -> list[Runner] | None:
        """The runners with the slowdowns that they cause each other; None if there are none to speak of.

        Others count with the part of time in which they run beside a job: they have something to do, and they find
        room in the compute that the job leaves.
        """
        if len(runners) == 1 and prefill_share >= 1.0:
            return None
        active = [1.0 - math.exp(-batch) for batch in state.batches]
        asked = [part * runner.share for part, runner in zip(active, runners, strict=True)]
        loads = [
            Load(load.bandwidth * part, load.compute * part)
            for runner, batch, part in zip(runners, state.batches, active, strict=True)
            for load in (runner.decode.load_at(batch),)
        ]
        left = 1.0 - prefill_share
        parts = [
            rate * runner.prefill.seconds_at(b)
            for rate, runner, b in zip(state.rates, runners, state.batches, strict=True)
        ]
        total = sum(parts)
        prefills = tuple(
            Load(runner.prefill.load.bandwidth * part, runner.prefill.load.compute * part)
            for runner, part in zip(runners, parts, strict=True)
        )
        stretched, worst = [], 1.0
        fit_prefill = [j for j, runner in enumerate(runners) if runner.share <= left + 1e-9]
        others = _crowded([loads[j] for j in fit_prefill], sum(asked[j] for j in fit_prefill), left)
        for i, runner in enumerate(runners):
            room = 1.0 - runner.share
            fit = [j for j in range(len(runners)) if j != i and runners[j].share <= room + 1e-9]
            beside, wanted = [loads[j] for j in fit], sum(asked[j] for j in fit)
            if runner.share <= left + 1e-9:
                beside += prefills
                wanted += total * prefill_share
            crowd = _crowded(beside, wanted, room)
            decode = self.engines.slowdown(mesh, runner.decode.load_at(state.batches[i]), crowd) if crowd else 1.0
            prefill = self.engines.slowdown(mesh, runner.prefill.load, others) if others and total else 1.0
            worst = max(worst, decode, prefill)
            stretched.append(runner._replace(decode_stretch=decode, prefill_stretch=prefill))
        return stretched if worst > _NEGLIGIBLE else None

    def _describe(
        self, mesh: Mesh, members: Members, shares: Shares, runners: list[Runner], state: Steady, pool: int
    ) -> UnitEstimate:
        waits = waiting(runners, state)
        models = []
        for i, (member, runner) in enumerate(zip(members, runners, strict=True)):
            demand = self.demands[member.model]
            batch, rate = state.batches[i], state.rates[i]
            models.append(
                ModelEstimate(
                    member=member,
                    rate=runner.rate,
                    throughput=rate,
                    batch=batch,
                    level=service_level(demand, runner, batch, rate, state, waits),
                    decode_share=shares.decode[i],
                    limit=_limit(demand, runner, batch, rate, state, pool, i),
                    memory=ReplicaMemory(self.engines.footprint(member.model, mesh).own, batch * runner.sequence),
                )
            )
        return UnitEstimate(
            mesh=mesh,
            prefill_share=shares.prefill,
            models=tuple(models),
            pool_bytes=pool,
            kv_bytes=state.pool_used,
            load=UnitLoad(state.prefill, state.decode, state.progress),
        )


def _crowded(loads: list[Load], asked: float, room: float) -> tuple[Load, ...]:
    """Loads of jobs that together ask for `asked` of the compute, as far as `room` lets them run."""
    part = min(1.0, room / asked) if asked > 0 else 1.0
    return tuple(Load(load.bandwidth * part, load.compute * part) for load in loads) if part > 0 else ()


def _limit(demand: Demand, runner: Runner, batch: float, rate: float, state: Steady, pool: int, index: int) -> str:
    """What holds a model back; for one that meets its rate, what would first if it grew."""
    sequences = "sequences" if demand.own_batch else "batch"
    if rate < MEETS * runner.rate:
        if state.short[index]:
            return "memory"
        if batch >= runner.most - 1e-6:
            return sequences if runner.most >= demand.max_num_seqs else "slo"
        return "compute"
    # Compute is used up when progress is, memory when the pool is, sequences at the model's own bound.
    uses = {
        "memory": state.pool_used / pool if pool else 1.0,
        "compute": max(state.prefill, 1.0 - state.progress, min(1.0, state.decode)),
        sequences: batch / demand.max_num_seqs,
    }
    return max(uses, key=lambda what: uses[what])
