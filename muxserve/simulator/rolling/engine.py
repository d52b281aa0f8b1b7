"""Instances and how each makes its steps: prompts before everything, prompts only, decodes only (`chunked` has prompts
in chunks beside decodes). When blocks run out the last to have joined gives way and is computed again (vLLM's recompute
preemption)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from muxserve.costs import EngineCosts
from muxserve.simulator.batch import DecodeBatch
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.rolling.requests import PhasedRequest
from muxserve.simulator.watch import Watch


class Told(Protocol):
    """Who hears of what happens in an engine."""

    def prefilling(self, engine: Engine, requests: Sequence[PhasedRequest], now: float, end: float) -> None:
        """A step over these whole prompts begins."""
        ...

    def prefilled(self, engine: Engine, requests: Sequence[PhasedRequest], now: float, seconds: float) -> None:
        """They have their (next) token, `seconds` after the step began. Those that are not finished decode here if the
        engine does that, otherwise they hold their blocks until they are released."""
        ...

    def decoded(self, engine: Engine) -> None:
        """A decode step has ended."""
        ...

    def finished(self, engine: Engine, request: PhasedRequest, now: float) -> None:
        """It has its last token; its blocks are free."""
        ...

    def preempted(self, engine: Engine, request: PhasedRequest, now: float) -> None:
        """It lost its blocks, and is in no queue."""
        ...


class _Batch(DecodeBatch):
    """Sequences may come to several engines, so the numbers that say when they joined must be different in all."""

    __slots__ = ()

    def __init__(self, block_tokens: int, number: int) -> None:
        super().__init__(block_tokens)
        self._serial = number << 40


class Engine:
    """One instance. Prompts that wait go first, as many whole ones as a step takes; otherwise all decode.

    `free` counts blocks. `watch`, if there is one, sees what it does; it knows steps of whole prompts or of decodes.
    """

    decodes = True

    def __init__(self, name: str, number: int, spec: InstanceSpec, costs: EngineCosts, told: Told) -> None:
        self.name = name
        self.spec = spec
        self.costs = costs
        self.free = spec.blocks
        self.waiting: deque[PhasedRequest] = deque()
        self.waiting_tokens = 0
        self.batch = _Batch(spec.block_tokens, number)
        self.stepping = False
        self.steps = 0
        self.busy = 0.0
        self.prefill_busy = 0.0
        self.preemptions = 0
        self.held = 0
        self.watch: Watch | None = None
        self._told = told
        self._kept = int(spec.blocks * spec.watermark)
        self._prefilling: list[PhasedRequest] = []
        self._decoding = False
        self._began = 0.0
        # Join at the end of the step under way.
        self._arrived: list[PhasedRequest] = []
        # Joined, and have not been in a decode step yet.
        self._fresh: list[PhasedRequest] = []

    # ------------------------------------------------------------ what comes and goes

    def enqueue(self, request: PhasedRequest, first: bool = False) -> None:
        """A prompt joins the queue, or, `first`, its front."""
        request.engine = self.name
        if first:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
        self.waiting_tokens += request.tokens

    def join(self, request: PhasedRequest) -> None:
        """A sequence whose KV is here, in blocks that are taken already, decodes from the next step on."""
        self.batch.add(request)
        if request.decoding_since is None:
            self._fresh.append(request)

    def arrive(self, request: PhasedRequest) -> None:
        """The same at any time: a sequence cannot join a step that is under way."""
        if self.stepping:
            self._arrived.append(request)
        else:
            self.join(request)

    def blocks_of(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.spec.block_tokens)

    def reserve(self, tokens: int) -> bool:
        """Take blocks for a sequence that is to join."""
        blocks = self.blocks_of(tokens)
        if self.free - blocks < (self._kept if self.batch.running else 0):
            return False
        self.free -= blocks
        return True

    def release(self, tokens: int) -> None:
        """Give such blocks back."""
        self.free += self.blocks_of(tokens)

    @property
    def load(self) -> float:
        """Tokens of KV that are here, and those of prompts that wait."""
        return (self.spec.blocks - self.free) * self.spec.block_tokens + self.waiting_tokens

    # ------------------------------------------------------------ steps

    def begin(self, now: float) -> float | None:
        """Begin the next step if there is anything to do; returns when it ends."""
        for request in self._arrived:
            self.join(request)
        self._arrived.clear()
        seconds = self._step(now)
        if self.watch is not None:
            self.watch.holds(now, self.spec.blocks - self.free)
        self.stepping = bool(seconds)
        if not seconds:
            return None
        seconds += self.spec.step_seconds
        self.steps += 1
        self.busy += seconds
        self._began = now
        if self._prefilling:
            self.prefill_busy += seconds
            self._told.prefilling(self, self._prefilling, now, now + seconds)
        return now + seconds

    def end(self, now: float) -> None:
        """The step under way ends."""
        if self.watch is not None:
            self._seen(self.watch, now)
        if self._decoding:
            self._decoding = False
            self._end_decode(now)
        if self._prefilling:
            prefilled, self._prefilling = self._prefilling, []
            self._end_prefill(prefilled, now)
        if self.watch is not None:
            self.watch.holds(now, self.spec.blocks - self.free)

    def _seen(self, watch: Watch, now: float) -> None:
        if self._prefilling:
            tokens = sum(request.tokens for request in self._prefilling)
            watch.did("prefill", self._began, now, len(self._prefilling), tokens)
        else:
            count = len(self.batch.running)
            watch.did("decode", self._began, now, count, count)

    def _step(self, now: float) -> float:
        return (self._prefill(now) if self.waiting else 0.0) or self._decode(now)

    def _prefill(self, now: float) -> float:
        spec, waiting = self.spec, self.waiting
        seats = spec.max_num_seqs - len(self.batch.running)
        taken = self._prefilling
        tokens = pairs = 0
        while waiting and len(taken) < seats:
            request = waiting[0]
            length = request.tokens
            if taken and tokens + length > spec.max_num_batched_tokens:
                break
            blocks = self.blocks_of(length)
            # A prompt that needs nearly all blocks may have the kept ones too, once nobody else is there.
            if self.free - blocks < (self._kept if self.batch.running or taken or self.held else 0):
                break
            self.free -= blocks
            waiting.popleft()
            self._begins(request, now)
            taken.append(request)
            tokens += length
            pairs += length * (length + 1) // 2
        if not taken:
            return 0.0
        self.waiting_tokens -= tokens
        return self.costs.prefill(tokens, pairs, len(taken))

    def _begins(self, request: PhasedRequest, now: float) -> None:
        if request.began is None:
            request.began = now

    def _decode(self, now: float) -> float:
        if not self._make_room(now):
            return 0.0
        context = self.batch.context
        return self.costs.decode(len(self.batch.running), context).seconds(context)

    def _make_room(self, now: float) -> bool:
        """Have the blocks that a decode step of all needs; False: there is none."""
        batch = self.batch
        if not batch.running:
            return False
        need = batch.needs[batch.counter % batch.block_tokens]
        while need > self.free:
            self._preempt(now)
            need = batch.needs[batch.counter % batch.block_tokens]
        self.free -= need
        if not batch.running:
            return False
        for request in self._fresh:
            # One that gave way again before its first step has no place in the batch.
            if request.serial:
                request.decoding_since = now
        self._fresh.clear()
        self._decoding = True
        return True

    def _preempt(self, now: float) -> None:
        request = next(reversed(self.batch.running))
        assert isinstance(request, PhasedRequest)
        self.free += self.batch.remove(request)
        request.preemptions += 1
        self.preemptions += 1
        self._told.preempted(self, request, now)

    def _end_decode(self, now: float) -> None:
        batch = self.batch
        self._told.decoded(self)
        batch.advance(batch.counter + 1)
        if batch.next_end() <= batch.counter:
            for request in batch.ended():
                assert isinstance(request, PhasedRequest)
                self.free += batch.remove(request)
                request.finish = now
                self._told.finished(self, request, now)

    def _end_prefill(self, prefilled: list[PhasedRequest], now: float) -> None:
        for request in prefilled:
            request.made += 1
            if request.first_token is None:
                request.first_token = now
        self._told.prefilled(self, prefilled, now, now - self._began)
        for request in prefilled:
            if request.made >= request.output:
                self.release(request.tokens - 1)
                request.finish = now
                self._told.finished(self, request, now)
            elif self.decodes:
                self.join(request)
            else:
                self.held += 1


class PrefillEngine(Engine):
    """Prompts only."""

    decodes = False

    def _step(self, now: float) -> float:
        return self._prefill(now) if self.waiting else 0.0

    def let_go(self, request: PhasedRequest) -> None:
        """Its KV is elsewhere."""
        self.held -= 1
        self.release(request.tokens - 1)


class DecodeEngine(Engine):
    """Decodes only."""

    def _step(self, now: float) -> float:
        return self._decode(now)
