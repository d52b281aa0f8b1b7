"""Making micro-batches: sequences that decode first, then prompts in order of arrival, within the budget and the KV
cache. When blocks run out the last to have come gives way and is computed again (vLLM's recompute preemption)."""

from __future__ import annotations

from collections import deque

from muxserve.scheduling.token_throttling import EngineState, TokenBudget
from muxserve.simulator.pipeline.requests import MicroBatch, PipelineRequest
from muxserve.simulator.pipeline.setup import PipelineSpec


class Batcher:
    """The sequences of one engine. `waiting` have not begun, `begun` have prompt tokens left, both in order of arrival;
    `ready` decode and are in no micro-batch, those that were ready first in front. `running` are all that hold blocks,
    in the order in which they got them. `used` counts blocks, equally many on each stage, `peak` the most there were.
    """

    def __init__(self, spec: PipelineSpec, budget: TokenBudget) -> None:
        self.spec = spec
        self.blocks = min(spec.blocks)
        self.used = 0
        self.peak = 0
        self.preemptions = 0
        self.waiting: deque[PipelineRequest] = deque()
        self.begun: list[PipelineRequest] = []
        self.ready: deque[PipelineRequest] = deque()
        self.running: dict[PipelineRequest, None] = {}
        self._budget = budget
        self._decoding = 0
        self._waiting_tokens = 0

    def arrive(self, request: PipelineRequest) -> None:
        """A request joins the queue."""
        self.waiting.append(request)
        self._waiting_tokens += request.tokens

    def state(self) -> EngineState:
        """What the budget is made from."""
        free = 1.0 - self.used / self.blocks
        return EngineState(self._waiting_tokens, self._decoding, len(self.ready), free, self.spec.in_flight)

    def make(self, now: float, idle: bool) -> MicroBatch | None:
        """The next micro-batch; None while nothing can run before another one ends. `idle`: none is in flight."""
        while self.waiting or self.begun or self.ready:
            budget, preemptions = self._budget.next(self.state()), self.preemptions
            batch = MicroBatch()
            self._decode(batch, budget.decode)
            # As in vLLM: a sequence that has just given way would take the blocks back at once.
            if self.preemptions == preemptions:
                self._prefill(batch, budget.prefill, now)
            if batch.chunks or batch.decodes:
                return batch
            if not idle:
                return None
            # Nothing will ever end: all memory lies with prompts that have begun and cannot go on. The last gives way.
            if self.preemptions == preemptions:
                self._preempt(self.begun[-1])
        return None

    def done(self, batch: MicroBatch, now: float) -> list[PipelineRequest]:
        """The tokens of a micro-batch are there; returns the sequences that have ended."""
        finished = []
        for request, _ in batch.chunks:
            request.flying -= 1
        for request in batch.decodes:
            request.flying -= 1
        self._decoding += len(batch.whole)
        for request in (*batch.decodes, *batch.whole):
            request.made += 1
            if request.first_token is None:
                request.first_token = now
            if request.made < request.output:
                self.ready.append(request)
                continue
            request.finish = now
            self._decoding -= 1
            self._release(request)
            finished.append(request)
        return finished

    # ------------------------------------------------------------ what goes in

    def _decode(self, batch: MicroBatch, most: int) -> None:
        ready, tokens = self.ready, self.spec.block_tokens
        while ready and len(batch.decodes) < most:
            request = ready[0]
            if request.computed == request.blocks * tokens:
                if self.used == self.blocks:
                    # Perhaps the request itself; then the next one is looked at.
                    self._preempt(next(r for r in reversed(self.running) if not r.flying))
                    continue
                self._hold(request, 1)
            ready.popleft()
            batch.add_decode(request)

    def _prefill(self, batch: MicroBatch, budget: int, now: float) -> None:
        for request in [r for r in self.begun if self.spec.chunk_ahead or not r.flying]:
            chunk = self._chunk(request, budget)
            if not chunk:
                return
            batch.add_chunk(request, chunk)
            budget -= chunk
            if request.computed == request.tokens:
                self.begun.remove(request)
        waiting = self.waiting
        while waiting and len(self.running) < self.spec.max_num_seqs:
            request = waiting[0]
            chunk = self._chunk(request, budget)
            if not chunk:
                return
            waiting.popleft()
            self.running[request] = None
            if request.began is None:
                request.began = now
            batch.add_chunk(request, chunk)
            budget -= chunk
            if request.computed < request.tokens:
                self.begun.append(request)

    def _chunk(self, request: PipelineRequest, budget: int) -> int:
        """How much of the prompt goes in now; its blocks are taken."""
        tokens = self.spec.block_tokens
        room = (request.blocks + self.blocks - self.used) * tokens - request.computed
        chunk = min(budget, request.tokens - request.computed, room)
        if chunk <= 0:
            return 0
        self._hold(request, -(-(request.computed + chunk) // tokens) - request.blocks)
        self._waiting_tokens -= chunk
        return chunk

    # ------------------------------------------------------------ blocks

    def _hold(self, request: PipelineRequest, blocks: int) -> None:
        request.blocks += blocks
        self.used += blocks
        self.peak = max(self.peak, self.used)

    def _release(self, request: PipelineRequest) -> None:
        self.used -= request.blocks
        request.blocks = 0
        del self.running[request]

    def _preempt(self, request: PipelineRequest) -> None:
        """It loses its blocks and goes back to the front of the queue, since it came before all that wait there."""
        if request.computed < request.tokens and request in self.begun:
            self.begun.remove(request)
            self._waiting_tokens += request.computed
        else:
            self.ready.remove(request)
            self._decoding -= 1
            self._waiting_tokens += request.tokens
        self._release(request)
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
