"""Instances of vLLM before chunked prefill was its default: nobody grants them steps, and prompts go first.

While a waiting prompt finds a seat and pages, a step prefills; otherwise it decodes. On the engines and the clock of
the simulator.
"""

from __future__ import annotations

from collections import deque

from muxserve.costs import LatencyModel
from muxserve.costs.step_costs import StepWork
from muxserve.scheduling.types import Phase
from muxserve.simulator import Options, SimUnit
from muxserve.simulator.clock import Clock
from muxserve.simulator.engine import StepEngine
from muxserve.simulator.job import BOUNDARY, IDLE
from muxserve.simulator.machine import UnitMachine
from muxserve.simulator.requests import SimRequest


class StockEngine(StepEngine):
    """The engine of an instance, which has all of the unit's devices for its one model."""

    def __init__(self, machine: UnitMachine) -> None:
        (model,), (pages,) = machine.spec.models, machine.pages.models
        super().__init__(machine, model, Phase.BOTH, pages)
        self.waiting: deque[SimRequest] = deque()
        self._computes_on(model.profile.engines.decode_share)
        machine.add(self)

    def arrive(self, request: SimRequest, now: float) -> None:
        """A request comes to the instance."""
        self.machine.record.requests.append(request)
        request.unit = self.machine.spec.name
        profile = self.model.profile
        blocks = -(-(request.prompt + request.output - 1) // profile.kv.block_tokens)
        most = self.pages.pool.profile.pages // self.pages.per_block
        if blocks > most:
            self.machine.refuse(
                request, now, f"longer than the {most * profile.kv.block_tokens} tokens of the instance"
            )
        else:
            self.submit(request, now)

    def submit(self, request: SimRequest, now: float) -> None:
        """A request comes in."""
        self.waiting.append(request)
        if len(self.waiting) == 1 or self.state == IDLE:
            self.wake(now)

    def wake(self, now: float) -> None:
        """Prompts that wait are to be looked at."""
        if self.state == IDLE:
            self.state = BOUNDARY
            self.machine.at_boundary(self)
        else:
            self.interrupt(now)

    # ------------------------------------------------------------ between steps

    def boundary(self, now: float) -> None:
        if self.chunks:
            done = self._end_chunks(now)
            for _ in range(len(done.finished) + len(done.through)):
                self.waiting.popleft()
            for request in done.through:
                self.batch.add(request)
        else:
            self._arrive(self._planned, now)
            self._end_decode(now)
        self.machine.at_boundary(self)

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
        seats = profile.engines.max_num_seqs - len(self.batch.running)
        tokens = pairs = 0
        for request in self.waiting:
            length = request.prompt + request.made
            if tokens >= profile.engines.max_num_batched_tokens or seats <= 0:
                break
            if not request.computed:
                if request.content:
                    self._find(request, now)
                # Room for the whole prompt at once, or it waits: nobody overtakes it.
                blocks = -(-length // profile.kv.block_tokens) + profile.kv.state_blocks
                if not pages.take(blocks - request.blocks, now, self.order):
                    if request.blocks:
                        self._lose(request)
                    break
                request.blocks = blocks
            chunk = min(length - request.computed, profile.engines.max_num_batched_tokens - tokens)
            seats -= 1
            self.chunks.append((request, chunk))
            tokens += chunk
            pairs += chunk * request.computed + chunk * (chunk + 1) // 2
        if not tokens:
            return False
        self._begin_chunks(StepWork(tokens, len(self.chunks), pairs), now)
        return True


def stock_instance(
    kind: type[StockEngine], unit: SimUnit, latency: LatencyModel, options: Options, clock: Clock
) -> StockEngine:
    """An instance on devices of its own."""
    return kind(UnitMachine(unit, latency, options, clock, None))
