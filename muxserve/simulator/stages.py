"""An engine whose layers are a pipeline: micro-batches follow each other through the stages, and what each holds is
decided by a `TokenBudget`, the object that decides in a live engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from muxserve.costs import EngineCosts, EngineShape, LatencyModel, ModelArchitecture
from muxserve.costs.architecture import ITEM_BYTES, split_layers
from muxserve.costs.latency import Load
from muxserve.costs.stages import costs_of_stages
from muxserve.costs.step_costs import StepCosts, StepWork
from muxserve.scheduling.token_throttling import BudgetInputs as Holding
from muxserve.scheduling.types import Phase, StepsDone
from muxserve.simulator.job import BOUNDARY, IDLE, NO_LOAD, STEPPING
from muxserve.simulator.leased import LeasedEngine, Scheduler, SimLease, SimReport
from muxserve.simulator.machine import UnitMachine
from muxserve.simulator.micro_batches import MicroBatches
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import Pipeline, SimModel, check_split
from muxserve.simulator.timeline import JobTimeline


@dataclass(slots=True)
class MicroBatch:
    """What goes through the stages together. `chunks` are prompts of which tokens are computed; `whole` are those whose
    prompt ends with it, which get a token by it like the `decodes`."""

    work: StepWork = field(default_factory=StepWork)
    chunks: list[SimRequest] = field(default_factory=list)
    whole: list[SimRequest] = field(default_factory=list)
    decodes: list[SimRequest] = field(default_factory=list)

    def add_chunk(self, request: SimRequest, tokens: int) -> None:
        """The next `tokens` of a prompt."""
        self.chunks.append(request)
        self.work.add_prompt(tokens, request.computed)
        request.computed += tokens
        request.flying += 1
        if request.computed == request.tokens:
            self.whole.append(request)

    def add_decode(self, request: SimRequest) -> None:
        """The next token of a sequence."""
        self.decodes.append(request)
        request.computed += 1
        request.flying += 1
        self.work.add_sequence(request.computed)


@dataclass(slots=True)
class _Untold:
    """What an engine has not reported `since` then: steps, their tokens, those of them that were of prompts, and
    requests."""

    since: float = 0.0
    steps: int = 0
    tokens: int = 0
    prefill: int = 0
    finished: list[SimRequest] = field(default_factory=list)
    through: list[SimRequest] = field(default_factory=list)
    returned: list[SimRequest] = field(default_factory=list)

    @property
    def news(self) -> bool:
        """The scheduler decides on it."""
        return bool(self.finished or self.through or self.returned)


class PipelineEngine(LeasedEngine):
    """One engine. Micro-batches pass every stage in the order in which they were made, so the whole way of one is known
    when it starts; each takes a step of the lease.

    `waiting` prompts have not begun, `begun` ones have tokens left, both in the order in which they came; `ready`
    sequences decode and are in no micro-batch, those that were ready first in front. `running` are all that hold
    blocks, in the order in which they got them. When blocks run out the last to have come gives way (vLLM's recompute
    preemption), and is given back.
    """

    def __init__(
        self, machine: UnitMachine, scheduler: Scheduler, model: SimModel, spec: Pipeline, pages: ModelPages
    ) -> None:
        super().__init__(machine, scheduler, model, Phase.BOTH, pages)
        self.spec = spec
        profile = model.profile
        self.share = profile.engines.decode_share if model.cost_share is None else model.cost_share
        shape = machine.spec.shape_of(model, self.share)
        self.stages = make_stages(spec, machine.latency, model.architecture, shape)
        self.record = MicroBatches(spec.stages)
        self.waiting: deque[SimRequest] = deque()
        self.begun: list[SimRequest] = []
        self.ready: deque[SimRequest] = deque()
        self.running: dict[SimRequest, None] = {}
        self._budget = spec.budget()
        # vLLM sends two tensors from stage to stage: the hidden states and the residual.
        token_bytes = 2.0 * model.architecture.hidden * ITEM_BYTES[model.dtype]
        # What is behind each stage; behind the last one there is none.
        self._links = [(link.latency, token_bytes / link.bandwidth) for link in spec.links] + [(0.0, 0.0)]
        self._flying: deque[tuple[float, MicroBatch]] = deque()
        self._decoding = 0
        # Decode steps, of which each gives every sequence a token, in parts of one.
        self._rounds = 0.0
        self._waiting_tokens = 0
        self._left = self._steps = 0
        self._begun = 0.0
        self._half_told = self._admitted = False
        self._untold = _Untold()

    def holding(self) -> Holding:
        """What the budget is made from; the free part of the cache is that of the model's quota."""
        free = 1.0 - self.pages.held / self.pages.quota
        return Holding(self._waiting_tokens, self._decoding, len(self.ready), free, self.spec.in_flight)

    # ------------------------------------------------------------ events of the unit

    def receive(self, lease: SimLease, now: float) -> None:
        self._pending = lease
        self._entering += lease.admit
        self.state = BOUNDARY
        self.machine.at_boundary(self)

    def boundary(self, now: float) -> None:
        flying = self._flying
        while flying and flying[0][0] <= now:
            self._done(flying.popleft()[1], now)
        self.state = BOUNDARY
        self.version += 1
        self._tell_if_due(now)
        self.machine.at_boundary(self)

    def kick(self, now: float) -> None:
        if self.calls:
            self._called(now)
        if self._pending is not None:
            self._take(self._pending, now)
        self._fill(now)
        flying, first = self._flying, self.stages[0]
        if len(flying) < self.spec.in_flight:
            # With a full pipeline a live engine waits for a micro-batch to come out before it says anything.
            self._tell_if_due(now)
        if not flying:
            self.state = IDLE
            return
        self.state = STEPPING
        self.planned_time = flying[0][0]
        if not self.spec.ahead and len(flying) < self.spec.in_flight and now < first.free_at < self.planned_time:
            self.planned_time = first.free_at
        self.machine.look(self)

    def plan(self) -> float:
        return self.planned_time

    def interrupt(self, now: float) -> None:
        """The next boundary is near anyway."""

    def retime(self, slow: float, now: float) -> None:
        # Micro-batches that are under way are not stretched any more.
        self.slow = slow

    def computed(self, request: SimRequest, now: float) -> int:
        return request.computed - request.flying

    def steps_by(self, now: float) -> int:
        """Tokens that a sequence has got which decodes since the beginning."""
        return int(self._rounds + 1e-6)

    def has(self, request: SimRequest) -> bool:
        return request in self.running

    def leave(self, request: SimRequest) -> int:
        self.ready.remove(request)
        self._decoding -= 1
        del self.running[request]
        if request.content:
            self.pages.publish(request, request.computed)
        return request.blocks

    def in_flight(self, request: SimRequest) -> bool:
        return request.flying > 0

    def _take(self, lease: SimLease, now: float) -> None:
        self._pending = None
        self.lease_id = lease.lease_id
        self._steps = self._left = lease.steps
        self._begun, self._deadline = now, now + lease.seconds
        self._half_told = False
        self._admitted = bool(self._entering)
        for request in self._entering:
            if request.blocks:
                # It comes with its KV, and decodes.
                request.computed = request.tokens - 1
                request.adopted(now)
                self.running[request] = None
                self.ready.append(request)
                self._decoding += 1
            else:
                self.waiting.append(request)
                self._waiting_tokens += request.tokens
        self._entering = []

    # ------------------------------------------------------------ micro-batches through the stages

    def _fill(self, now: float) -> None:
        """Start micro-batches, as long as there is one to start."""
        first, spec = self.stages[0], self.spec
        while len(self._flying) < spec.in_flight and (spec.ahead or first.free_at <= now):
            if self._left <= 0 or now >= self._deadline:
                return
            batch = self._make(now)
            if batch is None:
                return
            self._start(batch, now)

    def _start(self, batch: MicroBatch, now: float) -> None:
        work, spec = batch.work, self.spec
        if not self._flying:
            if not self._untold.steps:
                self._untold.since = now
            self.record.begins(now)
            self._runs(NO_LOAD, self.stages[0].seconds(work), now)
        if len(self.machine.compute.engines) > 1:
            # Stages share the devices with others, as processes on a CPU do.
            self._runs(self._load(work), self.stages[0].seconds(work), now)
        self._left -= 1
        untold = self._untold
        untold.steps += 1
        untold.tokens += work.tokens
        untold.prefill += work.prefill
        self.jobs += 1
        self.tokens += work.tokens
        arrives = now + self.machine.overheads.between
        self.record.made(now, work.prompts, work.prefill, work.decode)
        for number, (stage, (latency, per_token)) in enumerate(zip(self.stages, self._links, strict=True)):
            seconds = stage.seconds(work) * self.slow
            begins = max(arrives, stage.free_at)
            self.record.works(number, begins, seconds)
            stage.free_at = begins + seconds
            arrives = stage.free_at + latency + work.tokens * per_token
        self._flying.append((self.stages[-1].free_at + spec.return_seconds, batch))

    def _load(self, work: StepWork) -> Load:
        """What the stages that have something to do ask of the devices together."""
        each, stages = self.stages[0].load(work), min(len(self._flying) + 1, len(self.stages))
        bandwidth, compute = min(1.0, each.bandwidth * stages), min(1.0, each.compute * stages)
        return Load(bandwidth, compute)

    def _done(self, batch: MicroBatch, now: float) -> None:
        """The tokens of a micro-batch are there."""
        if not self._flying:
            self.record.ends(now)
            self._rests(now)
        for request in batch.chunks:
            request.flying -= 1
            if request.content and not request.flying:
                self.pages.publish(request, request.computed)
        for request in batch.decodes:
            request.flying -= 1
        if batch.decodes:
            self._rounds += len(batch.decodes) / self._decoding
        self._decoding += len(batch.whole)
        for request in batch.decodes:
            request.made += 1
            self._goes_on(request, now)
        for request in batch.whole:
            computed = request.computed
            request.got_token(now + self.machine.overheads.token)
            request.computed = computed
            if self._goes_on(request, now):
                self._untold.through.append(request)

    def _goes_on(self, request: SimRequest, now: float) -> bool:
        """A sequence has a token more; whether it was not the last."""
        if request.made < request.output:
            self.ready.append(request)
            return True
        self._decoding -= 1
        self._release(request)
        self._untold.finished.append(request)
        self.machine.finished(request, now)
        return False

    def _tell_if_due(self, now: float) -> None:
        """Report as `engine.lease.HeldLease` does."""
        untold = self._untold
        news, steps = untold.news, untold.steps
        left = self._left if now < self._deadline else 0
        remaining = len(self.running) + len(self.waiting)
        if not (news or steps) and (self._flying or left or not remaining):
            return
        half = self._left * 2 <= self._steps or now - self._begun >= self._deadline - now
        worth = news or untold.prefill or self._admitted or left <= 0 or (half and not self._half_told)
        if not (worth or not remaining):
            return
        self._half_told, self._admitted = half, False
        seconds = now - untold.since if steps else 0.0
        self._untold = _Untold(now if steps else untold.since)
        done = StepsDone(self.lease_id, left, seconds, untold.tokens, remaining, steps, untold.prefill)
        self.scheduler.report(SimReport(self, done, untold.finished, untold.through, untold.returned))

    # ------------------------------------------------------------ what goes in

    def _make(self, now: float) -> MicroBatch | None:
        """The next micro-batch; None while nothing can run before another one ends."""
        while self.waiting or self.begun or self.ready:
            budget, returned = self._budget.next(self.holding()), len(self._untold.returned)
            batch = MicroBatch()
            self._decode(batch, budget.decode, now)
            # As in vLLM: a sequence that has just given way would take the blocks back at once.
            if len(self._untold.returned) == returned:
                self._prefill(batch, budget.prefill, now)
            if batch.chunks or batch.decodes:
                return batch
            if self._flying or not self.begun:
                return None
            # Nothing will ever end: all memory lies with prompts that have begun and cannot go on. The last gives way.
            if len(self._untold.returned) == returned:
                self._gives_way(self.begun[-1], now)
        return None

    def _decode(self, batch: MicroBatch, most: int, now: float) -> None:
        ready, tokens = self.ready, self.model.profile.kv.block_tokens
        while ready and len(batch.decodes) < most:
            request = ready[0]
            if request.computed == request.blocks * tokens:
                if not self.pages.take(1, now, self.order):
                    # Perhaps the request itself; then the next one is looked at.
                    self._gives_way(self.victim([r for r in self.running if not r.flying]), now)
                    continue
                request.blocks += 1
            ready.popleft()
            if request.decoding_since is None:
                request.decoding_since = now
            batch.add_decode(request)

    def _prefill(self, batch: MicroBatch, budget: int, now: float) -> None:
        for request in [r for r in self.begun if self.spec.chunk_ahead or not r.flying]:
            chunk = self._chunk(request, budget, now)
            if not chunk:
                return
            batch.add_chunk(request, chunk)
            budget -= chunk
            if request.computed == request.tokens:
                self.begun.remove(request)
        waiting = self.waiting
        while waiting and len(self.running) < self.model.profile.engines.max_num_seqs:
            request = waiting[0]
            chunk = self._chunk(request, budget, now)
            if not chunk:
                return
            waiting.popleft()
            self.running[request] = None
            batch.add_chunk(request, chunk)
            budget -= chunk
            if request.computed < request.tokens:
                self.begun.append(request)

    def _chunk(self, request: SimRequest, budget: int, now: float) -> int:
        """How much of the prompt goes in now; its blocks are taken."""
        tokens = self.model.profile.kv.block_tokens
        begins = bool(request.content) and not request.computed and budget > 0
        if begins:
            self._find(request, now)
        room = (request.blocks + self.pages.available_blocks()) * tokens - request.computed
        chunk = min(budget, request.tokens - request.computed, room)
        blocks = -(-(request.computed + chunk) // tokens) - request.blocks
        if chunk <= 0 or (blocks and not self.pages.take(blocks, now, self.order)):
            if begins:
                self._lose(request)
            return 0
        request.blocks += blocks
        # Cached tokens do not wait any more.
        self._waiting_tokens -= chunk + (request.computed if begins else 0)
        return chunk

    def publish(self, now: float) -> None:
        for request in self.running:
            if request.content and request.made:
                self.pages.publish(request, request.computed - request.flying)

    # ------------------------------------------------------------ blocks

    def _release(self, request: SimRequest) -> None:
        if request.content:
            self.pages.publish(request, request.computed)
        self.pages.give_up(request, request.blocks)
        request.blocks = 0
        del self.running[request]

    def _gives_way(self, request: SimRequest, now: float) -> None:
        """It loses its blocks and is given back."""
        if request.computed < request.tokens and request in self.begun:
            self.begun.remove(request)
            self._waiting_tokens -= request.tokens - request.computed
        else:
            self.ready.remove(request)
            self._decoding -= 1
        self._release(request)
        request.computed = 0
        request.preempted(now)
        self._untold.returned.append(request)

    # ------------------------------------------------------------ what is seen of it

    def timelines(self) -> list[JobTimeline]:
        """One of each stage, on devices of its own; where they share one, as processes on a CPU do, one of all."""
        spec = self.machine.spec
        tp = len(spec.devices) // self.spec.stages
        found: list[JobTimeline] = []
        for number in range(self.spec.stages):
            name = f"{self.model.name}, stage {number + 1},"
            if tp or not found:
                found.append(JobTimeline(spec.name, spec.device, spec.devices[number * tp :][:tp] or spec.devices))
            for step in self.record.steps_of(number):
                phase = "mixed" if step.prefill and step.decode else "prefill" if step.prefill else "decode"
                sequences, tokens = step.prompts + step.decode, step.prefill + step.decode
                found[-1].job(name, phase, step.began, step.ended, sequences, tokens)
        return found


# ---------------------------------------------------------------- what stages cost and hold


def kv_blocks(
    architecture: ModelArchitecture,
    dtype: str,
    stages: int,
    memory: Sequence[float],
    block_tokens: int = 16,
    split: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Blocks that each stage's KV cache can have. `memory` is what each stage has for weights and KV, bytes, of all its
    devices together; `split` says how many layers each has (None: `split_layers`).

    Raises:
        ValueError: the weights leave no room, or the lengths do not fit.
    """
    if split is None:
        split = split_layers(architecture.layers, stages)
    check_split(split, architecture.layers, stages)
    if len(memory) != stages:
        raise ValueError(f"{stages} stages have {len(memory)} memories")
    found = []
    for number, layers in enumerate(split):
        part = replace(architecture, layers=layers, tied_embeddings=True, stored=None)
        # Embeddings lie on the first stage and the LM head on the last; on a single one both, unless they are tied.
        ends = (number == 0) + (number == stages - 1)
        if architecture.tied_embeddings and stages == 1:
            ends = 1
        matrix = architecture.vocab * architecture.hidden
        weights = part.weight_bytes(dtype) + (ends - 1) * matrix * ITEM_BYTES[dtype]
        room = memory[number] - weights
        blocks = int(room // (part.kv_bytes_per_token(dtype) * block_tokens))
        if blocks < 1:
            raise ValueError(
                f"stage {number} has {memory[number] / 2**30:.1f} GiB, of which its weights take "
                f"{weights / 2**30:.1f}: no room for a block"
            )
        found.append(blocks)
    return tuple(found)


class Stage(StepCosts):
    """One stage. `free_at` is when it has done all it was given."""

    def __init__(self, costs: EngineCosts) -> None:
        super().__init__(costs)
        self.free_at = 0.0


def make_stages(
    spec: Pipeline, latency: LatencyModel, architecture: ModelArchitecture, shape: EngineShape
) -> list[Stage]:
    """The stages of that engine, each on a shape of its own.

    Raises:
        CostError: the latency model does not know a part of the model on that device.
        ValueError: the layers are not the model's.
    """
    check_split(spec.layers, architecture.layers, spec.stages)
    return [Stage(costs) for costs in costs_of_stages(spec.layers, latency, architecture, shape)]
