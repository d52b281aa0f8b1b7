"""Engines that prefill and decode by themselves, as stock vLLM does: nobody grants them steps.

Waiting prompts go first: while one finds a seat and pages, a step prefills; otherwise it decodes. Each model of a unit
is one such engine. One model alone is what spatial partitioning serves; several side by side are the unit without the
split of phases.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from muxserve.replicas.views import InstanceLoad
from muxserve.scheduling.types import Phase, share_units
from muxserve.simulator.engine import BOUNDARY, IDLE, StepEngine
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimModel
from muxserve.simulator.unit import SimulatedUnit


class StockEngine(StepEngine):
    """One model's engine."""

    def __init__(self, unit: SimulatedUnit, model: SimModel, pages: ModelPages) -> None:
        super().__init__(unit, model, Phase.BOTH, pages)
        self.waiting: deque[SimRequest] = deque()
        share = share_units(model.profile.decode_share)
        self._costs = unit.costs(model, share, share, Phase.DECODE)

    def submit(self, request: SimRequest, now: float) -> None:
        """A request comes in."""
        self.waiting.append(request)
        if len(self.waiting) == 1 or self.state == IDLE:
            self.wake(now)

    def wake(self, now: float) -> None:
        """Prompts that wait are to be looked at."""
        if self.state == IDLE:
            self.state = BOUNDARY
            self.unit.at_boundary(self)
        else:
            self.interrupt(now)

    # ------------------------------------------------------------ between steps

    def boundary(self, now: float) -> None:
        if self.chunks:
            done = self._end_prefill(now)
            for _ in range(len(done.finished) + len(done.through)):
                self.waiting.popleft()
            for request in done.through:
                self.batch.add(request)
        else:
            self._arrive(self._planned, now)
            self._end_decode(now)
        self.unit.at_boundary(self)

    def _arrive(self, counter: int, now: float) -> None:
        steps = counter - self.batch.counter
        self.jobs += steps
        self.tokens += steps * len(self.batch.running)
        super()._arrive(counter, now)

    def kick(self, now: float) -> None:
        batch = self.batch
        if self.waiting and self._prefill(now):
            return
        preempted: list[SimRequest] = []
        need = batch.needs[batch.counter % batch.block_tokens]
        if need and not self.pages.take(need, now, self.order):
            preempted = self._preempt(now)
            # They are computed again when there is room, in the order in which they had come.
            self.waiting.extendleft(preempted)
        if not batch.running:
            self.state = IDLE
            self._rests(now)
            return
        self._go_on(now)
        # What was given up may find room again after this step; and a prompt that waits with a prefix looks for that
        # before each, which counts as use of it.
        looks = bool(preempted) or (bool(self.waiting) and bool(self.waiting[0].content))
        self._leap(batch.counter + 1 if looks else min(batch.next_end(), batch.until))

    def _prefill(self, now: float) -> bool:
        """Begin a prefill step, if a waiting prompt finds a seat and pages."""
        profile, pages = self.model.profile, self.pages
        seats = profile.max_num_seqs - len(self.batch.running)
        tokens = pairs = 0
        for request in self.waiting:
            length = request.prompt + request.made
            if tokens >= profile.max_num_batched_tokens or seats <= 0:
                break
            if not request.computed:
                if request.content:
                    self._find(request, now)
                # Room for the whole prompt at once, or it waits: nobody overtakes it.
                blocks = -(-length // profile.block_tokens) + profile.state_blocks
                if not pages.take(blocks - request.blocks, now, self.order):
                    if request.blocks:
                        self._lose(request)
                    break
                request.blocks = blocks
            chunk = min(length - request.computed, profile.max_num_batched_tokens - tokens)
            seats -= 1
            self.chunks.append((request, chunk))
            tokens += chunk
            pairs += chunk * request.computed + chunk * (chunk + 1) // 2
        if not tokens:
            return False
        self._begin_prefill(tokens, pairs, now)
        return True


class StockUnit(SimulatedUnit):
    """Simulates a unit whose models are stock engines."""

    stock_engine: ClassVar[type[StockEngine]] = StockEngine

    def _begin(self) -> None:
        spec = self.spec
        self._by_name: dict[str, StockEngine] = {}
        for model, pages in zip(spec.models, self.pages, strict=True):
            if spec.adapt_quotas:
                # First come, first served: the whole pool is anybody's.
                pages.quota = pages.pool.profile.pages
            self._by_name[model.name] = engine = self.stock_engine(self, model, pages)
            self._add(engine)

    def enqueue(self, request: SimRequest, now: float) -> None:
        engine = self._by_name[request.model]
        pages, block_tokens = engine.pages, engine.model.profile.block_tokens
        states = engine.model.profile.state_blocks
        needed = (-(-(request.prompt + request.output - 1) // block_tokens) + states) * pages.per_block
        most = min(pages.quota, pages.pool.profile.pages)
        if needed > most:
            room = max(0, most // pages.per_block - states) * block_tokens
            self.refuse(request, now, f"longer than the {room} tokens that {request.model} has pages for")
            return
        engine.submit(request, now)

    def freed(self, pages: ModelPages, now: float) -> None:
        """Prompts of other models that wait for pages are looked at again."""
        for other in pages.pool.models:
            if other is not pages:
                engine = self._by_name[self.spec.models[other.index].name]
                if engine.waiting:
                    engine.wake(now)

    def load(self, name: str) -> InstanceLoad:
        self._count_pages(self.clock.now)
        engine = self._by_name[name]
        pages, waiting, block = engine.pages, engine.waiting, engine.model.profile.block_tokens
        most = min(pages.quota, pages.pool.profile.pages) // pages.per_block
        states = engine.model.profile.state_blocks
        demands = [(-(-request.tokens // block) + states) * block for request in waiting]
        return InstanceLoad(
            name=self.spec.name,
            capacity=most * block,
            model=name,
            used=min(most, pages.pool.held // pages.per_block) * block,
            running=len(engine.batch.running) + len(engine.chunks),
            waiting=len(waiting),
            head_demand=demands[0] if demands else 0,
            queued_demand=sum(demands),
        )
