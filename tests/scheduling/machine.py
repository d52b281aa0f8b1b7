"""A deterministic executor for policies: virtual clock, engines that run steps, a pool that hands out blocks.

It plays what surrounds the scheduling core and checks at every turn what must always hold: engines that run at the same
moment never take more than the whole unit, every request is in exactly one place, and the ledger's sums are right.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from muxserve.replicas.priorities import ServiceClass
from muxserve.scheduling.admission import wants_decode, wants_prefill
from muxserve.scheduling.free import Free
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import AGAIN_SECONDS, Policy
from muxserve.scheduling.types import (
    WHOLE,
    EngineSetup,
    Grant,
    KvLayout,
    ModelProfile,
    Phase,
    PoolProfile,
    QueuedRequest,
    RequestPlace,
    StepsDone,
)
from tests.support.requests import without

# Policies that run one prefill job at a time.
ONE_PREFILL = ("adbs", "slack")


@dataclass
class Job:
    """One request as the machine sees it; `output` is how many tokens it will generate. In an engine of both phases it
    `decodes` once it has its first token there."""

    request_id: str
    model: str
    prompt: int
    output: int
    arrival: float
    priority: int = 0
    made: int = 0
    computed: int = 0
    blocks: int = 0
    lease_id: int = 0
    decodes: bool = False
    first_token: float | None = None
    done: float | None = None

    def queued(self, resumed: bool) -> QueuedRequest:
        return QueuedRequest(
            self.request_id,
            model=self.model,
            prompt_tokens=self.prompt,
            max_tokens=self.output,
            arrival=self.arrival,
            service=ServiceClass(self.priority),
            output_tokens=self.made,
            resumed=resumed,
        )


@dataclass
class Engine:
    model: str
    phase: Phase
    doing: Phase = Phase.BOTH
    jobs: list[Job] = field(default_factory=list)
    lease_id: int = 0
    steps: int = 0
    deadline: float = 0.0
    share: int = 0
    computing_on: int = 0
    stepping: bool = False
    up: bool = True
    aborts: list[Job] = field(default_factory=list)
    life: int = 0
    ran: list[tuple[float, float]] = field(default_factory=list)

    def todo(self) -> list[Job]:
        """What a step under the present lease could do something for."""
        if self.doing is Phase.BOTH or self.phase is not Phase.BOTH:
            return self.jobs
        return [job for job in self.jobs if job.decodes is (self.doing is Phase.DECODE)]


@dataclass
class Done:
    """A step: tokens in all and its length, and what of that was prefill, as reports have it."""

    tokens: int
    seconds: float
    prefill_tokens: int
    prefill_seconds: float


def profile(name: str, **changes: object) -> ModelProfile:
    """A small model; the pool is called `pool`."""
    values: dict[str, Any] = {
        "pool": "pool",
        "rate": 1.0,
        "layers": 2,
        "kv_heads": 2,
        "block_tokens": 16,
        "quota_pages": 400,
        "floor_pages": 80,
        "prefill_share": 0.5,
        "decode_share": 0.5,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    } | changes
    kv = KvLayout(**without(values, *KvLayout.__match_args__))
    engines = EngineSetup(**without(values, *EngineSetup.__match_args__))
    return ModelProfile(name, kv=kv, engines=engines, **values)


class Machine:
    """Runs `policy` over `profiles`; times are virtual seconds."""

    def __init__(
        self,
        policy: Policy,
        profiles: list[ModelProfile],
        pages: int,
        latency: float = 0.0002,
        prefill_seconds: Callable[[int], float] = lambda tokens: 0.001 + 0.00005 * tokens,
        decode_seconds: Callable[[int], float] = lambda sequences: 0.002 + 0.0001 * sequences,
    ) -> None:
        self.policy = policy
        self.pages = pages
        self.ledger = UnitLedger(profiles, [PoolProfile("pool", pages)])
        self.now = 0.0
        self.latency = latency
        self.prefill_seconds = prefill_seconds
        self.decode_seconds = decode_seconds
        self.quotas = {p.name: p.quota_pages for p in profiles}
        self.profiles = {p.name: p for p in profiles}
        phases = {p.name: (Phase.BOTH,) if p.engines.both else (Phase.PREFILL, Phase.DECODE) for p in profiles}
        self.engines = {(name, phase): Engine(name, phase) for name, has in phases.items() for phase in has}
        # Under this policy leases overlap.
        self.overlap = isinstance(policy, Free)
        self.jobs: dict[str, Job] = {}
        # Held by the jobs of each model.
        self.blocks = dict.fromkeys(self.profiles, 0)
        self.handed: dict[str, Job] = {}
        self.cancelled: set[str] = set()
        self.lost: list[str] = []
        self.preemptions = 0
        self.moving: dict[str, Job] = {}
        self.moved: set[str] = set()
        self.turns = 0
        # No request is longer than its model's floor, so that nobody has to make room.
        self.floors_hold = True
        self.watch: Callable[[Machine, list[Grant]], None] | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._lease_id = 0
        self._wakeup = -1.0
        for model, phase in self.engines:
            self.ledger.engine_up(model, phase, 0.0)

    def engine(self, model: str, phase: Phase) -> Engine:
        return self.engines[model, Phase.BOTH if self.profiles[model].engines.both else phase]

    # ------------------------------------------------------------ clock

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (max(time, self.now), self._serial, action))

    def run(self, until: float = float("inf"), most_turns: int = 200_000) -> None:
        """Play events up to `until`, or until every request is done."""
        while self._heap and self._heap[0][0] <= until:
            if until == float("inf") and not self.unfinished() and not self.ledger.requests:
                return
            self.now, _, action = heapq.heappop(self._heap)
            action()
            self.turn()
            self.turns += 1
            assert self.turns < most_turns, f"no end in sight at {self.now:.3f} s: {self.describe()}"
        self.now = max(self.now, until) if until != float("inf") else self.now

    def unfinished(self) -> list[Job]:
        return [j for j in self.jobs.values() if j.done is None and j.request_id not in self.cancelled]

    def describe(self) -> str:
        return ", ".join(
            f"{m.name}: {len(m.queue)} queued {len(m.prefilling)} prefilling {len(m.handed)} handed "
            f"{len(m.decoding)} decoding {m.used}/{m.quota} pages"
            for m in self.ledger.models
        )

    # ------------------------------------------------------------ what the outside does

    def submit(self, job: Job) -> None:
        self.jobs[job.request_id] = job
        self.at(job.arrival, lambda: self._arrive(job))

    def _arrive(self, job: Job, resumed: bool = False) -> None:
        if job.request_id in self.cancelled:
            return
        self.ledger.arrived(job.queued(resumed), self.now)

    def cancel(self, request_id: str) -> None:
        """An engine that holds the request hears of it a little later, and drops it between two steps."""
        job = self.jobs[request_id]
        self.cancelled.add(request_id)
        place = self.ledger.cancelled(request_id, self.now)
        if place is RequestPlace.HANDED:
            self._free(self.handed.pop(request_id))
        elif place is RequestPlace.MOVING:
            self._free(self.moving.pop(request_id))
        elif place in (RequestPlace.PREFILLING, RequestPlace.DECODING):
            engine = self.engine(job.model, Phase.PREFILL if place is RequestPlace.PREFILLING else Phase.DECODE)
            life = engine.life

            def arrive() -> None:
                if engine.life == life:
                    engine.aborts.append(job)
                    if not engine.stepping:
                        self._abort(engine)

            self.at(self.now + self.latency, arrive)

    def _abort(self, engine: Engine) -> None:
        aborted = [job for job in engine.aborts if any(job is each for each in engine.jobs)]
        engine.aborts = []
        if not aborted:
            return
        engine.jobs = [job for job in engine.jobs if not any(job is each for each in aborted)]
        for job in aborted:
            self._free(job)
        life, lease_id, remaining = engine.life, engine.lease_id, len(engine.jobs)
        left = engine.steps if self.now < engine.deadline else 0

        def report() -> None:
            if engine.life == life:
                self.ledger.stepped(
                    engine.model,
                    engine.phase,
                    StepsDone(lease_id, left, seconds=0.0, tokens=0, remaining=remaining),
                    self.now,
                )

        self.at(self.now + self.latency, report)

    def kill(self, model: str, phase: Phase, seconds: float = 0.5) -> None:
        """An engine that is up dies, and is back after `seconds`; what it held is submitted again."""
        engine = self.engine(model, phase)
        if not engine.up:
            return
        engine.up, engine.life, engine.steps, engine.stepping = False, engine.life + 1, 0, False
        engine.aborts = []
        if engine.ran and engine.ran[-1][1] > self.now:
            engine.ran[-1] = (engine.ran[-1][0], self.now)
        gone = self.ledger.engine_down(model, engine.phase, self.now)
        for job in engine.jobs:
            self._free(job)
        engine.jobs = []
        for request_id in gone:
            job = self.jobs[request_id]
            if self.handed.pop(request_id, None) is not None:
                self._free(job)
            job.computed = 0
            self.lost.append(request_id)
            self._arrive(job, resumed=True)

        def back() -> None:
            engine.up = True
            assert self.ledger.engine_up(model, engine.phase, self.now) == []

        self.at(self.now + seconds, back)

    def detach(self, request_id: str, until: float, arrives: bool) -> None:
        """A request is moved to another unit, which has it at `until` if it `arrives`. Nothing happens unless it is
        decoding; the engine lets go of it between two steps."""
        job = self.jobs[request_id]
        engine = self.engine(job.model, Phase.DECODE)
        live = self.ledger.requests.get(request_id)
        if live is None or live.place is not RequestPlace.DECODING or engine.stepping or job not in engine.jobs:
            return
        engine.jobs = [each for each in engine.jobs if each is not job]
        assert self.ledger.detached(request_id, live.lease_id, job.made, self.now)
        self.moving[request_id] = job

        def end() -> None:
            if self.moving.pop(request_id, None) is None:
                return
            if arrives:
                assert self.ledger.moved(request_id, self.now)
                self._free(job)
                self.moved.add(request_id)
                job.done = self.now
            else:
                assert self.ledger.stays(request_id, self.now)
                self.handed[request_id] = job

        self.at(until, end)

    def take_over(self, job: Job) -> None:
        """A request comes from another unit with the KV of all but its last token, if there is room for it."""
        job.computed = job.prompt + job.made - 1
        self.jobs[job.request_id] = job
        if not self._grow(job, job.computed):
            job.arrival = float("inf")
            job.done = self.now
            return
        self.handed[job.request_id] = job
        live = self.ledger.taken_over(job.queued(resumed=True), self.now)
        assert live.place is RequestPlace.HANDED

    # ------------------------------------------------------------ pages

    def used(self, model: str) -> int:
        return self.blocks[model] * self.profiles[model].kv.pages_per_block

    def _grow(self, job: Job, tokens: int) -> bool:
        p = self.profiles[job.model]
        need = -(-tokens // p.kv.block_tokens) - job.blocks
        if need <= 0:
            return True
        pages = need * p.kv.pages_per_block
        if self.used(job.model) + pages > self.quotas[job.model]:
            return False
        if sum(self.used(m) for m in self.profiles) + pages > self.pages:
            return False
        job.blocks += need
        self.blocks[job.model] += need
        return True

    def _free(self, job: Job) -> None:
        self.blocks[job.model] -= job.blocks
        job.blocks = job.computed = 0
        job.decodes = False

    # ------------------------------------------------------------ steps

    def _kick(self, engine: Engine) -> None:
        if engine.stepping or not engine.up or not engine.todo() or engine.steps <= 0 or self.now >= engine.deadline:
            return
        engine.stepping = True
        engine.steps -= 1
        engine.computing_on = engine.share
        running = sum(e.computing_on for e in self.engines.values() if e.stepping)
        assert self.overlap or running <= WHOLE, f"{running} of {WHOLE} in use at {self.now}"
        work, prefill_tokens, returned = [], 0, []
        phase = engine.doing if engine.phase is Phase.BOTH else engine.phase
        if phase is not Phase.PREFILL:
            work, returned = self._take_decode(engine)
        decoded = len(work)
        if phase is not Phase.DECODE:
            chunks = self._take_prefill(engine, decoded)
            prefill_tokens = sum(chunk for _, chunk in chunks)
            work += chunks
        seconds = self.prefill_seconds(prefill_tokens) if prefill_tokens else 0.0
        seconds = (seconds + (self.decode_seconds(decoded) if decoded else 0.0)) or 0.0005
        alone = seconds if phase is Phase.PREFILL else 0.0
        life = engine.life
        engine.ran.append((self.now, self.now + seconds))
        done = Done(decoded + prefill_tokens, seconds, prefill_tokens, alone)
        self.at(self.now + seconds, lambda: self._stepped(engine, life, work, done, returned))

    def _take_prefill(self, engine: Engine, decoded: int) -> list[tuple[Job, int]]:
        left, work = self.profiles[engine.model].engines.max_num_batched_tokens - decoded, []
        for job in engine.jobs:
            if job.decodes and engine.phase is Phase.BOTH:
                continue
            chunk = min(job.prompt + job.made - job.computed, left)
            if chunk <= 0 or not self._grow(job, job.computed + chunk):
                break
            work.append((job, chunk))
            left -= chunk
        return work

    def _take_decode(self, engine: Engine) -> tuple[list[tuple[Job, int]], list[Job]]:
        work, returned = [], []
        jobs = [job for job in engine.jobs if job.decodes or engine.phase is Phase.DECODE]
        while jobs:
            job = jobs.pop(0)
            while not self._grow(job, job.prompt + job.made):
                victim = jobs.pop() if jobs else job
                self._free(victim)
                returned.append(victim)
                if victim is job:
                    break
            else:
                work.append((job, 1))
        engine.jobs = [job for job in engine.jobs if not any(job is each for each in returned)]
        self.preemptions += len(returned)
        return work, returned

    def _stepped(self, engine: Engine, life: int, work: list[tuple[Job, int]], step: Done, returned: list[Job]) -> None:
        if engine.life != life:
            return
        engine.stepping = False
        finished, handed, prefilled = [], [], []
        for job, count in work:
            first = engine.phase is not Phase.DECODE and not job.decodes
            if first:
                job.computed += count
                if job.computed < job.prompt + job.made:
                    continue
            job.made += 1
            if job.first_token is None:
                job.first_token = self.now
            if job.made >= job.output:
                job.done = self.now
                finished.append(job)
            elif engine.phase is Phase.PREFILL:
                handed.append(job)
            elif first:
                job.decodes = True
                prefilled.append(job)
        gone = {id(j) for j in (*finished, *handed)}
        engine.jobs = [j for j in engine.jobs if id(j) not in gone]
        for job in finished:
            self._free(job)
        for job in handed:
            self.handed[job.request_id] = job
        lease_id, left = engine.lease_id, engine.steps if self.now < engine.deadline else 0
        remaining = len(engine.jobs)
        tickets = {j.request_id: j.lease_id for j in (*handed, *prefilled, *returned)}

        def report() -> None:
            if engine.life != life:
                return
            for job in finished:
                assert self.ledger.finished(job.request_id, engine.phase, lease_id, self.now) or (
                    job.request_id in self.cancelled
                )
            for job in handed:
                if not self.ledger.handed_over(job.request_id, tickets[job.request_id], job.made, self.now):
                    assert job.request_id in self.cancelled
                    self._free(self.handed.pop(job.request_id))
            for job in prefilled:
                first = self.ledger.prefilled(job.request_id, tickets[job.request_id], job.made, self.now)
                assert first or job.request_id in self.cancelled
            for job in returned:
                self.ledger.returned(job.request_id, tickets[job.request_id], job.made, self.now)
            self.ledger.stepped(
                engine.model,
                engine.phase,
                StepsDone(
                    lease_id,
                    left,
                    seconds=step.seconds,
                    tokens=step.tokens,
                    remaining=remaining,
                    steps=1,
                    prefill_tokens=step.prefill_tokens,
                    prefill_seconds=step.prefill_seconds,
                ),
                self.now,
            )

        self.at(self.now + self.latency, report)
        self._abort(engine)
        self._kick(engine)

    # ------------------------------------------------------------ the scheduler's turn

    def turn(self) -> list[Grant]:
        for model in self.ledger.models:
            self.ledger.pages(model.name, self.used(model.name), 0, self.quotas[model.name])
        free = self.pages - sum(m.used for m in self.ledger.models)
        self.ledger.pool_pages("pool", free, 0)
        changes = self.policy.rebalance(self.ledger, self.now)
        for change in changes:
            self.quotas[change.model] = change.pages
        if changes:
            self.check_quotas()
            for model in self.ledger.models:
                self.ledger.pages(model.name, model.used, 0, self.quotas[model.name])
        grants = self.policy.decide(self.ledger, self.now)
        engines = {(g.model, self.ledger.by_name[g.model].engine(g.phase).phase) for g in grants}
        assert len(engines) == len(grants), "two grants for one engine"
        for grant in grants:
            model = self.ledger.by_name[grant.model]
            prompts = model.in_engines and any(r not in model.handed for r in grant.admit)
            self._grant(grant)
            # What is promised to a prompt is rounded up by a block. An engine that is empty, but for requests that were
            # cancelled, has their pages soon.
            most = model.quota + len(model.prefilling) * model.pages_per_block
            assert not prompts or model.used + model.promised <= most, "pages are promised that nobody has"
        self.check()
        if self.watch is not None:
            self.watch(self, grants)
        wakeup = self.policy.wakeup(self.ledger, self.now)
        if wakeup < float("inf") and (self._wakeup <= self.now or wakeup < self._wakeup) and self.ledger.requests:
            self._wakeup = wakeup if wakeup > self.now else self.now + AGAIN_SECONDS
            self.at(self._wakeup, lambda: None)
        return grants

    def _grant(self, grant: Grant) -> None:
        self._lease_id += 1
        lease_id = self._lease_id
        self.ledger.granted(grant, lease_id, self.now)
        engine = self.engine(grant.model, grant.phase)
        entering = [self.jobs[request_id] for request_id in grant.admit]
        for job in entering:
            job.decodes = self.handed.pop(job.request_id, None) is not None
            job.lease_id = lease_id
        # Blocks are counted with the engine from here on, whenever the message arrives.
        engine.jobs += entering
        life = engine.life

        def arrive() -> None:
            if engine.life != life:
                return
            smaller = grant.share < engine.share
            engine.lease_id, engine.steps, engine.share = lease_id, grant.steps, grant.share
            if smaller and not engine.stepping:
                # The report of a running step comes at its end.
                remaining = len(engine.jobs)
                told = StepsDone(lease_id, grant.steps, 0.0, 0, remaining)
                self.at(
                    self.now + self.latency,
                    lambda: (
                        self.ledger.stepped(grant.model, engine.phase, told, self.now) if engine.life == life else None
                    ),
                )
            engine.doing = grant.phase
            engine.deadline = self.now + grant.seconds
            self._kick(engine)

        self.at(self.now + self.latency, arrive)

    # ------------------------------------------------------------ what must always hold

    def check_quotas(self) -> None:
        assert sum(self.quotas.values()) <= self.pages
        for name, quota in self.quotas.items():
            assert quota >= self.profiles[name].floor_pages or not self.floors_hold

    def check(self) -> None:
        ledger = self.ledger
        leases = [e.lease for m in ledger.models for e in m.engines if e.lease is not None]
        assert all(lease.held >= lease.share for lease in leases)
        assert ledger.share_used == sum(lease.held for lease in leases)
        assert self.overlap or ledger.share_used <= WHOLE
        assert sum(m.promised for m in ledger.models) == ledger.pools["pool"].promised
        if len(ledger.requests) > 60 and self.turns % 200:
            return  # looking at every request every time is for small loads
        holding = [*self.handed.values(), *self.moving.values(), *(j for e in self.engines.values() for j in e.jobs)]
        assert sum(job.blocks for job in holding) == sum(self.blocks.values()), "blocks of a request that is nowhere"
        prefills = [m for m in ledger.models if m.prefill.lease is not None and not m.both]
        assert self.policy.name not in ONE_PREFILL or len(prefills) <= 1
        placed: list[str] = []
        for model in ledger.models:
            queued = list(model.queue.first(len(model.queue)))
            assert model.queue.blocks == sum(r.blocks for r in queued)
            assert [r.key for r in queued] == sorted(r.key for r in queued)
            # What comes from other units waits in the decode engine if there is no seat.
            assert model.in_engines <= model.max_seqs + model.tally.moved_in
            assert sum(model.levels.values()) == model.in_engines
            tally = model.tally
            ended = tally.finished + tally.cancelled + tally.lost + tally.moved_out + tally.given_back
            assert tally.arrived + tally.moved_in == ended + model.live
            assert all(request_id in model.decoding for request_id in model.fresh)
            for place, requests in (
                (RequestPlace.QUEUED, queued),
                (RequestPlace.PREFILLING, model.prefilling.values()),
                (RequestPlace.HANDED, model.handed.values()),
                (RequestPlace.DECODING, model.decoding.values()),
                (RequestPlace.MOVING, model.moving.values()),
            ):
                assert all(request.place is place for request in requests)
                placed += [request.request_id for request in requests]
            assert model.prefill_tokens == sum(r.tokens for r in model.prefilling.values())
            assert 0 <= model.outstanding <= model.prefill_tokens
            waits = model.decode.up and model.decode.lease is None
            work = model.decode.inside or model.handed or (model.both and model.queue)
            assert (model.decode.wait_since is not None) is bool(waits and work)
        there = set(placed)
        assert len(placed) == len(there)
        assert there == ledger.requests.keys()
        for job in self.jobs.values():
            if job.done is None and job.request_id not in self.cancelled:
                assert (job.arrival <= self.now) if job.request_id in there else (job.arrival >= self.now), job


def could_run(machine: Machine) -> list[tuple[str, int]]:
    """Jobs without a lease that have work and pages, and the shares that they need."""
    ledger, now, policy = machine.ledger, machine.now, machine.policy
    one = policy.name in ONE_PREFILL and any(m.prefill.lease is not None and not m.both for m in ledger.models)
    jobs = []
    for model in ledger.models:
        if not one and wants_prefill(ledger, model, now, policy.limit(model)):
            jobs.append((f"{model.name}/prefill", model.prefill.share))
        if wants_decode(ledger, model, now, policy.limit(model)):
            jobs.append((f"{model.name}/{model.decode.phase}", model.decode.share))
    return jobs


def idle_although_possible(machine: Machine) -> str | None:
    """What work conservation forbids: compute is free, something could use it, and nothing else waits for more of it.

    Returns what could have run.
    """
    ledger, now = machine.ledger, machine.now
    free = ledger.share_free
    jobs = could_run(machine)
    long = [m.decode.share for m in ledger.models if m.decode.ready(now) and now - (m.decode.wait_since or now) > 0.1]
    if any(share > free for share in [*long, *(share for name, share in jobs if name.endswith("/prefill"))]):
        return None
    return ", ".join(name for name, share in jobs if share <= free) or None
