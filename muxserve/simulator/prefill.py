"""The prefill engine of one model under leases, as `muxserve.engine` runs it: chunked prefill and hand-over."""

from __future__ import annotations

from muxserve.scheduling.types import Phase
from muxserve.simulator.leaps import BOUNDARY, IDLE, STALLED, STEPPING
from muxserve.simulator.leases import Lease, Leased, LeasedHost
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimModel


class PrefillEngine(Leased):
    """The prefill engine of one model: prompts in order, in chunks of what one step may compute."""

    def __init__(self, unit: LeasedHost, model: SimModel, order: int, pages: ModelPages) -> None:
        super().__init__(model, Phase.PREFILL, order, pages)
        self._without_lease(unit)
        self.requests: list[SimRequest] = []
        self._left = 0
        self._chunks: list[tuple[SimRequest, int]] = []
        self._duration = 0.0
        self._work = 0.0
        self._at = 0.0
        self._started = 0.0

    def boundary(self, now: float) -> None:
        host = self.unit
        stalled = self.state == STALLED
        finished: list[SimRequest] = []
        handed: list[SimRequest] = []
        tokens = 0
        for request, chunk in self._chunks:
            tokens += chunk
            request.computed += chunk
            if request.computed < request.prompt + request.made:
                continue
            request.made += 1
            request.computed = 0
            if request.first_token is None:
                request.first_token = now + host.overheads.token
            if request.made >= request.output:
                finished.append(request)
                self.pages.release(request.blocks)
                host.finished(request, now)
            else:
                handed.append(request)
            request.blocks = 0
        done = len(finished) + len(handed)
        if done:
            # Chunks are taken in order, so those that are through stand in front.
            del self.requests[:done]
        if finished:
            host.freed(self.pages, now)
        if host.timeline is not None and tokens:
            host.timeline.job(self.model.name, self.phase, self._started, now, len(self._chunks), tokens)
        self._left -= 1
        self.jobs += 1
        self.tokens += tokens
        self.state = BOUNDARY
        self.version += 1
        seconds = host.overheads.stall if stalled else now - self._started
        left = self._left if now < self._deadline else 0
        host.report(self, left, seconds, tokens, 1, len(self.requests), now, finished, handed, [])
        host.at_boundary(self)

    def kick(self, now: float) -> None:
        host = self.unit
        if self._pending is not None:
            self._take(self._pending, now)
        if not self.requests or self._left <= 0 or now >= self._deadline:
            self.state = IDLE
            self._rests(host, now)
            return
        tokens, pairs = self._choose(now)
        self._started = now
        if not tokens:
            self.state = STALLED
            self._rests(host, now)
            self.planned_time = now + host.overheads.stall
            host.look(self)
            return
        costs = self._costs
        assert costs is not None
        count = len(self._chunks)
        self._duration = costs.prefill(tokens, pairs, count) + host.overheads.prefill_step
        self._work, self._at = 0.0, now
        self.state = STEPPING
        self._runs(host, costs.prefill_load(tokens, pairs, count), now)
        self.planned_time = now + self._duration * self.slow
        host.look(self)

    def _take(self, lease: Lease, now: float) -> None:
        self._accept(lease, Phase.PREFILL, now)
        self._left = lease.steps
        self.requests += self._entering
        self._entering = []

    def _choose(self, now: float) -> tuple[int, int]:
        """Fill a step with chunks that find pages; returns its tokens and attention pairs."""
        self._chunks, size = [], self.model.profile.block_tokens
        budget = self.model.profile.max_num_batched_tokens
        tokens = pairs = 0
        for request in self.requests:
            chunk = min(request.prompt + request.made - request.computed, budget - tokens)
            if chunk <= 0:
                break
            end = request.computed + chunk
            blocks = -(-end // size) - request.blocks
            if blocks and not self.pages.take(blocks, now, self.order):
                if request.computed and not tokens:
                    # It gives up what it has and starts again, so that others can go on.
                    self.pages.release(request.blocks)
                    request.blocks = request.computed = 0
                    request.preemptions += 1
                    self.unit.freed(self.pages, now)
                break
            request.blocks += blocks
            self._chunks.append((request, chunk))
            tokens += chunk
            pairs += chunk * request.computed + chunk * (chunk + 1) // 2
        return tokens, pairs

    def releases(self) -> bool:
        """A request ends with the step that runs."""
        return any(request.output - request.made <= 1 for request, _ in self._chunks)

    def retime(self, slow: float, now: float) -> None:
        if self.state == STEPPING:
            self._work += (now - self._at) / self.slow
            self._at = now
            self.planned_time = now + max(0.0, self._duration - self._work) * slow
            self.unit.look(self)
        self.slow = slow
