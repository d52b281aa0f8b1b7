"""Hybrid batching: chunks of prompts beside decodes, in steps of at most so many tokens (Sarathi-Serve)."""

from __future__ import annotations

from collections.abc import Sequence

from muxserve.costs import EngineCosts
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.pipeline.stages import Stage, Work
from muxserve.simulator.rolling.engine import Engine, Told
from muxserve.simulator.rolling.requests import PhasedRequest


class ChunkedEngine(Engine):
    """All decode in each step, and what `budget` tokens leave is for prompts, in chunks (Sarathi-Serve, algorithm 3).

    A prompt has blocks for all of it before its first chunk.
    """

    def __init__(
        self, name: str, number: int, spec: InstanceSpec, costs: EngineCosts, told: Told, budget: int = 512
    ) -> None:
        super().__init__(name, number, spec, costs, told)
        self.budget = budget
        self._mixed = Stage(costs, spec.blocks, spec.architecture.layers)
        # It has begun and is not finished; at most one.
        self._partial: PhasedRequest | None = None

    def _step(self, now: float) -> float:
        decoding = len(self.batch.running) if self._make_room(now) else 0
        context = self.batch.context if decoding else 0
        tokens, prompts, pairs = self._chunks(self.budget - decoding, now)
        if not (decoding or tokens):
            return 0.0
        return self._mixed.seconds(Work(tokens, prompts, pairs, decoding, context))

    def _chunks(self, room: int, now: float) -> tuple[int, int, int]:
        tokens = prompts = pairs = 0
        seats = self.spec.max_num_seqs - len(self.batch.running)
        while room > 0 and len(self._prefilling) < seats:
            request = self._partial or self._next(now)
            if request is None:
                break
            before = request.computed
            chunk = min(room, request.tokens - before)
            room -= chunk
            tokens += chunk
            prompts += 1
            pairs += chunk * before + chunk * (chunk + 1) // 2
            request.computed += chunk
            self.waiting_tokens -= chunk
            self._partial = request
            if request.computed == request.tokens:
                self._prefilling.append(request)
                self._partial = None
        return tokens, prompts, pairs

    def _next(self, now: float) -> PhasedRequest | None:
        if not self.waiting:
            return None
        request = self.waiting[0]
        blocks = self.blocks_of(request.tokens)
        if self.free - blocks < (self._kept if self.batch.running or self._prefilling else 0):
            return None
        self.free -= blocks
        request.computed = 0
        self._begins(request, now)
        return self.waiting.popleft()


def largest_budget(
    spec: InstanceSpec, costs: EngineCosts, tpot: float, prompt: int, batch: int, budgets: Sequence[int]
) -> int:
    """The largest of `budgets` (tokens) with which a mixed step keeps `tpot` seconds, `batch` sequences of twice the
    prompt's length decoding beside chunks from the middle of prompts of `prompt` tokens; the smallest if none does.
    It is how Sarathi-Serve (section 4.3) has the budget chosen: by profiling, for the TPOT objective."""
    stage = Stage(costs, spec.blocks, spec.architecture.layers)
    best = min(budgets)
    for budget in sorted(budgets):
        chunk = max(1, budget - batch)
        pairs = chunk * (prompt // 2) + chunk * (chunk + 1) // 2
        if stage.seconds(Work(chunk, 1, pairs, batch, 2 * batch * prompt)) + spec.step_seconds <= tpot:
            best = budget
    return best
