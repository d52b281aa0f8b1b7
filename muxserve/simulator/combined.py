"""Engines that prefill and decode by themselves, as stock vLLM does: nobody grants them steps.

Waiting prompts go first: while one finds a seat and pages, a step prefills; otherwise it decodes. Each model of a unit
is one such engine. One model alone is what spatial partitioning serves; several side by side are the unit without the
split of phases.
"""

from __future__ import annotations

from collections import deque

from muxserve.costs import LatencyModel
from muxserve.scheduling.types import Phase, share_units
from muxserve.simulator.leaps import BOUNDARY, IDLE, STEPPING, Host, LeapingEngine
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import Options, SimModel, SimUnit
from muxserve.simulator.world import World

# Of the pool, what vLLM keeps free when it admits a prompt, so that running sequences can grow.
_WATERMARK = 0.01


class CombinedEngine(LeapingEngine):
    """One model's engine."""

    def __init__(self, host: Host, model: SimModel, order: int, pages: ModelPages) -> None:
        super().__init__(host, model, "both", order, pages)
        self.waiting: deque[SimRequest] = deque()
        share = share_units(model.profile.decode_share)
        self._costs = host.costs(model, share, share, Phase.DECODE)
        # The chunks of a prefill step under way; none while it decodes.
        self._chunks: list[tuple[SimRequest, int]] = []
        self._duration = self._work = self._at = 0.0

    def leaping(self) -> bool:
        return self.state == STEPPING and not self._chunks

    def submit(self, request: SimRequest, now: float) -> None:
        """A request comes in."""
        self.waiting.append(request)
        if self.state == IDLE:
            self.state = BOUNDARY
            self.host.at_boundary(self)
        elif len(self.waiting) == 1:
            self.interrupt(now)

    # ------------------------------------------------------------ between steps

    def boundary(self, now: float) -> None:
        if self._chunks:
            self._prefilled(now)
        else:
            self._arrive(self._planned, now)
            finished = self.batch.ended()
            for request in finished:
                self.pages.release(self.batch.remove(request))
                self.host.finished(request, now)
            if finished:
                self._dirty = True
                self.host.freed(self.pages, now)
        self.host.at_boundary(self)

    def _arrive(self, counter: int, now: float) -> None:
        steps = counter - self.batch.counter
        self.jobs += steps
        self.tokens += steps * len(self.batch.running)
        super()._arrive(counter, now)

    def _prefilled(self, now: float) -> None:
        host, tokens = self.host, 0
        for request, chunk in self._chunks:
            tokens += chunk
            request.computed += chunk
            if request.computed < request.prompt + request.made:
                continue
            self.waiting.popleft()
            request.made += 1
            request.computed = 0
            if request.first_token is None:
                request.first_token = now + host.overheads.token
            if request.made >= request.output:
                self.pages.release(request.blocks)
                host.finished(request, now)
                host.freed(self.pages, now)
            else:
                self.batch.add(request)
            request.blocks = 0
        if host.timeline is not None:
            host.timeline.job(self.model.name, "prefill", self._traced_at, now, len(self._chunks), tokens)
        self._chunks = []
        self._dirty = True
        self.jobs += 1
        self.tokens += tokens
        self.state = BOUNDARY
        self.version += 1

    def kick(self, now: float) -> None:
        host, batch = self.host, self.batch
        if self.waiting and self._prefill(now):
            return
        counter, preempted = batch.counter, False
        while batch.running:
            need = batch.needs[counter % batch.block_tokens]
            if not need or self.pages.take(need, now, self.order):
                break
            # vLLM gives up the last to have joined; it is computed again when there is room.
            victim = next(reversed(batch.running))
            self.pages.release(batch.remove(victim))
            victim.preemptions += 1
            self.waiting.appendleft(victim)
            self._dirty = preempted = True
        if preempted:
            host.freed(self.pages, now)
        if not batch.running:
            self.state = IDLE
            self._rests(host, now)
            return
        if self._dirty or not self.active or counter >= batch.until:
            self._begin(now)
        else:
            batch.resume()
        # What was given up may find room again after this step.
        self._leap(counter + 1 if preempted else min(batch.next_end(), batch.until))

    def _prefill(self, now: float) -> bool:
        """Begin a prefill step, if a waiting prompt finds a seat and pages."""
        profile, pages, host = self.model.profile, self.pages, self.host
        reserve = int(_WATERMARK * pages.pool.profile.pages) // pages.per_block if pages.held else 0
        seats = profile.max_num_seqs - len(self.batch.running)
        tokens = pairs = 0
        for request in self.waiting:
            chunk = min(request.prompt + request.made - request.computed, profile.max_num_batched_tokens - tokens)
            if chunk <= 0 or seats <= 0:
                break
            if not request.computed:
                # Room for the whole prompt at once, or it waits: nobody overtakes it.
                blocks = -(-(request.prompt + request.made) // profile.block_tokens)
                if not pages.take(blocks, now, self.order, reserve):
                    break
                request.blocks = blocks
            seats -= 1
            self._chunks.append((request, chunk))
            tokens += chunk
            pairs += chunk * request.computed + chunk * (chunk + 1) // 2
        if not tokens:
            return False
        count = len(self._chunks)
        costs = self._costs
        assert costs is not None
        self._duration = costs.prefill(tokens, pairs, count) + host.overheads.prefill_step
        self._work, self._at, self._traced_at = 0.0, now, now
        self.state = STEPPING
        self._dirty = True
        self._runs(host, costs.prefill_load(tokens, pairs, count), now)
        self.planned_time = now + self._duration * self.slow
        host.look(self)
        return True

    def plan(self) -> float:
        return self.planned_time if self._chunks else super().plan()

    def retime(self, slow: float, now: float) -> None:
        if self._chunks and self.state == STEPPING:
            self._work += (now - self._at) / self.slow
            self._at = now
            self.planned_time = now + max(0.0, self._duration - self._work) * slow
            self.host.look(self)
        super().retime(slow, now)


class CombinedUnit(World):
    """Simulates a unit whose models are combined engines."""

    combined_engine: type[CombinedEngine] = CombinedEngine

    def __init__(self, unit: SimUnit, latency: LatencyModel, options: Options | None = None) -> None:
        super().__init__(unit, latency, options)
        self._by_name: dict[str, CombinedEngine] = {}
        for index, (model, pages) in enumerate(zip(unit.models, self.pages, strict=True)):
            if not unit.adapt_quotas:
                pages.quota = model.profile.quota_pages
            else:
                # First come, first served: the whole pool is anybody's.
                pages.quota = pages.pool.profile.pages
            engine = self.combined_engine(self, model, index, pages)
            self.engines.append(engine)
            self._by_name[model.name] = engine

    def arrive(self, request: SimRequest, now: float) -> None:
        engine = self._by_name[request.model]
        pages = engine.pages
        tokens = request.prompt + request.output - 1
        needed = -(-tokens // engine.model.profile.block_tokens) * pages.per_block
        most = min(pages.quota, pages.pool.profile.pages)
        if needed > most:
            room = most // pages.per_block * engine.model.profile.block_tokens
            self.refuse(request, now, f"longer than the {room} tokens that {request.model} has pages for")
            return
        engine.submit(request, now)

    def freed(self, pages: ModelPages, now: float) -> None:
        """Prompts that wait for pages are looked at again."""
        for other in pages.pool.models:
            engine = self.engines[other.index]
            assert isinstance(engine, CombinedEngine)
            if other is not pages and engine.waiting:
                if engine.state == IDLE:
                    engine.state = BOUNDARY
                    self.at_boundary(engine)
                else:
                    engine.interrupt(now)
