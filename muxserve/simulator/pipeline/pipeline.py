"""The clock of a pipeline: arrivals, micro-batches that go through the stages, and their tokens coming back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from muxserve.costs import LatencyModel
from muxserve.costs.architecture import ITEM_BYTES
from muxserve.scheduling.token_throttling import TokenBudget
from muxserve.simulator.pipeline.batching import Batcher
from muxserve.simulator.pipeline.requests import MicroBatch, PipelineRequest
from muxserve.simulator.pipeline.result import PipelineResult
from muxserve.simulator.pipeline.setup import PipelineSpec
from muxserve.simulator.pipeline.stages import make_stages
from muxserve.simulator.watch import Watch
from muxserve.workload.trace import TraceRequest


class Pipeline:
    """One engine. Micro-batches pass every stage in the order in which they were made, so the whole way of one is known
    when it starts. `watch`, if there is one, sees the blocks in use.

    Raises:
        CostError: the latency model does not know the model on that device.
    """

    def __init__(
        self, spec: PipelineSpec, latency: LatencyModel, budget: TokenBudget, watch: Watch | None = None
    ) -> None:
        self.spec = spec
        self._watch = watch
        self.stages = make_stages(spec, latency)
        self.batcher = Batcher(spec, budget)
        self.result = PipelineResult(spec.stages)
        # vLLM sends two tensors from stage to stage: the hidden states and the residual.
        self._token_bytes = 2.0 * spec.architecture.hidden * ITEM_BYTES[spec.shape.dtype]
        # What is behind each stage; behind the last one there is none.
        links = spec.links if spec.links is not None else (spec.link,) * (spec.stages - 1)
        self._links = [(link.latency, self._token_bytes / link.bandwidth) for link in links] + [(0.0, 0.0)]
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._in_flight = 0
        self._active_since = 0.0

    def run(self, workload: Iterable[TraceRequest]) -> PipelineResult:
        """Play the workload to its end."""
        arrivals = enumerate(workload)
        following = next(arrivals, None)
        heap = self._heap
        while following is not None or heap:
            if following is not None and (not heap or following[1].arrival <= heap[0][0]):
                number, each = following
                self._arrive(number, each)
                following = next(arrivals, None)
                # Requests of one moment are seen together.
                if following is None or following[1].arrival > each.arrival:
                    self._fill(each.arrival)
            else:
                now, _, callback = heappop(heap)
                callback(now)
        return self._summarise()

    # ------------------------------------------------------------ events

    def _at(self, when: float, callback: Callable[[float], None]) -> None:
        self._serial += 1
        heappush(self._heap, (when, self._serial, callback))

    def _arrive(self, number: int, each: TraceRequest) -> None:
        request = PipelineRequest(str(number), each.model, each.arrival, each.prompt_tokens, each.output_tokens)
        self.result.requests.append(request)
        # The last token's KV is never needed.
        needed = request.prompt + request.output - 1
        if needed > self.spec.capacity:
            request.error = f"{needed} tokens, and the smallest stage has room for {self.spec.capacity}"
            return
        self.batcher.arrive(request)

    def _fill(self, now: float) -> None:
        """Start micro-batches, as long as there is one to start."""
        first = self.stages[0]
        while self._in_flight < self.spec.in_flight and (self.spec.ahead or first.free_at <= now):
            batch = self.batcher.make(now, idle=not self._in_flight)
            self._look(now)
            if batch is None:
                return
            self._start(batch, now)

    def _look(self, now: float) -> None:
        if self._watch is not None:
            self._watch.holds(now, self.batcher.used)

    def _start(self, batch: MicroBatch, now: float) -> None:
        spec, work = self.spec, batch.work
        if not self._in_flight:
            self._active_since = now
        self._in_flight += 1
        arrives = now + spec.step_seconds
        self.result.made(batch, now)
        for number, (stage, (latency, per_token)) in enumerate(zip(self.stages, self._links, strict=True)):
            seconds = stage.seconds(work)
            begins = max(arrives, stage.free_at)
            self.result.works(number, begins, seconds)
            stage.free_at = begins + seconds
            arrives = stage.free_at + latency + work.tokens * per_token
            if number == 0 and not spec.ahead:
                self._at(stage.free_at, self._fill)
        self._at(self.stages[-1].free_at + spec.return_seconds, lambda now: self._done(batch, now))

    def _done(self, batch: MicroBatch, now: float) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self.result.active_span(self._active_since, now)
        self.batcher.done(batch, now)
        self._look(now)
        self._fill(now)

    def _summarise(self) -> PipelineResult:
        result, batcher = self.result, self.batcher
        result.seconds = max((r.finish for r in result.requests if r.finish is not None), default=0.0)
        result.peak_kv = [batcher.peak / stage.blocks for stage in self.stages]
        result.preemptions = batcher.preemptions
        return result


def simulate(
    spec: PipelineSpec, latency: LatencyModel, budget: TokenBudget, workload: Iterable[TraceRequest]
) -> PipelineResult:
    """Play `workload` on one engine. The same arguments give the same result, if `budget` is new.

    Raises:
        CostError: the latency model does not know the model on that device.
    """
    pipeline = Pipeline(spec, latency, budget)
    collecting = gc.isenabled()
    # Many small objects and hardly a cycle: collecting costs a third of the time.
    gc.disable()
    try:
        return pipeline.run(workload)
    finally:
        if collecting:
            gc.enable()
