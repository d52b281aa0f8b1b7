"""One instance: waiting prompts first, otherwise a decode step of all; the last to have joined gives way when blocks
run out and is computed again (vLLM's recompute preemption)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from muxserve.costs import EngineCosts
from muxserve.replicas.priorities import Levels
from muxserve.replicas.views import InstanceLoad, InstanceView, RequestView
from muxserve.simulator.batch import DecodeBatch
from muxserve.simulator.instances.requests import ReplicaRequest
from muxserve.simulator.instances.setup import InstanceSpec

IDLE, STEPPING, STOPPED = range(3)


def _place(request: ReplicaRequest) -> tuple[int, float, str]:
    return -request.rank, request.arrival, request.request_id


class _Batch(DecodeBatch):
    """Sequences move between batches, so the numbers that say when they joined must be different in all of them."""

    __slots__ = ()

    def __init__(self, block_tokens: int, number: int) -> None:
        super().__init__(block_tokens)
        self._serial = number << 40


class Instance:
    """The `number`-th instance. `free` blocks are nobody's; `reserved` ones wait for requests on their way in.
    `finished` is told of each request that has its last token; `moving_in` and `moving_out` count migrations."""

    def __init__(
        self,
        name: str,
        number: int,
        spec: InstanceSpec,
        costs: EngineCosts,
        levels: Levels,
        slowdown: float,
        finished: Callable[[ReplicaRequest, float], None],
    ) -> None:
        self.name = name
        self.spec = spec
        self.state = IDLE
        self.free = spec.blocks
        self.reserved = 0
        self.batch = _Batch(spec.block_tokens, number)
        self.waiting: list[ReplicaRequest] = []
        self.moving_in = 0
        self.moving_out = 0
        self.draining = False
        self.steps = 0
        self.preemptions = 0
        self.busy = 0.0
        self.started = 0.0
        self.stopped: float | None = None
        # Called at the end of the step under way: migrations that wait for the sequence to be between two steps.
        self.at_boundary: list[Callable[[float], None]] = []
        # What the cluster calls at the end of each step.
        self.on_end: Callable[[float], None] = self.end
        self._costs = costs
        self._levels = levels
        self._slowdown = slowdown
        self._finished = finished
        self._prefilling: list[ReplicaRequest] = []
        self._queued_blocks = 0
        self._running: dict[str, int] = {}
        self._load = InstanceLoad(name, spec.capacity, levels=self._running)
        self._kept = int(spec.blocks * spec.watermark)

    # ------------------------------------------------------------ what comes and goes

    def enqueue(self, request: ReplicaRequest) -> None:
        """A request joins the queue: by scheduling priority, then by arrival."""
        request.instance = self
        insort(self.waiting, request, key=_place)
        self._queued_blocks += self.blocks_of(request.prompt + request.made)

    def withdraw_all(self) -> list[ReplicaRequest]:
        """All that wait leave, since the instance drains."""
        gone, self.waiting = self.waiting, []
        self._queued_blocks = 0
        for request in gone:
            request.instance = None
        return gone

    def leave(self, request: ReplicaRequest) -> int:
        """A running request leaves the batch between two steps; returns its blocks, which stay taken."""
        self._count(request, -1)
        return self.batch.remove(request)

    def join(self, request: ReplicaRequest) -> None:
        """A request joins the batch between two steps, with its KV in blocks that are taken already."""
        request.instance = self
        self._count(request, 1)
        self.batch.add(request)

    def blocks_of(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.spec.block_tokens)

    def computed(self, request: ReplicaRequest) -> int:
        """Tokens in the KV of a running request."""
        return request.base + self.batch.counter

    # ------------------------------------------------------------ steps

    def begin(self, now: float) -> float | None:
        """Begin the next step if there is anything to do; returns when it ends."""
        seconds = self._prefill() if self.waiting else 0.0
        if not seconds:
            seconds = self._decode(now)
            if not seconds:
                self.state = IDLE
                return None
        seconds += self.spec.step_seconds
        if self.moving_in or self.moving_out:
            seconds *= self._slowdown
        self.state = STEPPING
        self.steps += 1
        self.busy += seconds
        return now + seconds

    def end(self, now: float) -> None:
        """The step under way ends."""
        if self._prefilling:
            prefilled, self._prefilling = self._prefilling, []
            for request in prefilled:
                self._prefilled(request, now)
        else:
            self.batch.advance(self.batch.counter + 1)
            if self.batch.next_end() <= self.batch.counter:
                for done in self.batch.ended():
                    assert isinstance(done, ReplicaRequest)
                    self.free += self.leave(done)
                    self._finished(done, now)
        if self.at_boundary:
            callbacks, self.at_boundary = self.at_boundary, []
            for callback in callbacks:
                callback(now)

    def _prefill(self) -> float:
        spec, waiting = self.spec, self.waiting
        seats = spec.max_num_seqs - len(self.batch.running)
        tokens = pairs = count = 0
        while count < len(waiting) and count < seats:
            length = waiting[count].prompt + waiting[count].made
            blocks = self.blocks_of(length)
            if count and tokens + length > spec.max_num_batched_tokens:
                break
            # A prompt that needs nearly all blocks may have the kept ones too, once nobody else is there.
            kept = self._kept if self.batch.running or count else 0
            if self.free - blocks < kept:
                break
            self.free -= blocks
            self._queued_blocks -= blocks
            tokens += length
            pairs += length * (length + 1) // 2
            count += 1
        if not count:
            return 0.0
        self._prefilling = waiting[:count]
        del waiting[:count]
        for request in self._prefilling:
            self._count(request, 1)
        return self._costs.prefill(tokens, pairs, count)

    def _prefilled(self, request: ReplicaRequest, now: float) -> None:
        request.made += 1
        if request.first_token is None:
            request.first_token = now
        if request.preempted_at is not None:
            request.lost += now - request.preempted_at
            request.preempted_at = None
        if request.made >= request.output:
            self._count(request, -1)
            self.free += self.blocks_of(request.prompt + request.made - 1)
            self._finished(request, now)
        else:
            self.batch.add(request)

    def _decode(self, now: float) -> float:
        batch = self.batch
        if not batch.running:
            return 0.0
        need = batch.needs[batch.counter % batch.block_tokens]
        while need > self.free:
            self._preempt(now)
            need = batch.needs[batch.counter % batch.block_tokens]
        self.free -= need
        if not batch.running:
            return 0.0
        context = batch.context
        return self._costs.decode(len(batch.running), context).seconds(context)

    def _preempt(self, now: float) -> None:
        """The last of the lowest execution priority goes back to the queue."""
        ranks = self._levels
        lowest: ReplicaRequest | None = None
        for request in reversed(self.batch.running):
            assert isinstance(request, ReplicaRequest)
            if lowest is None or ranks[request.execution].rank < ranks[lowest.execution].rank:
                lowest = request
        assert lowest is not None
        self.free += self.leave(lowest)
        lowest.preemptions += 1
        lowest.preempted_at = now
        self.preemptions += 1
        self.enqueue(lowest)

    def _count(self, request: ReplicaRequest, by: int) -> None:
        self._running[request.execution] = self._running.get(request.execution, 0) + by

    # ------------------------------------------------------------ what it reports

    def load(self) -> InstanceLoad:
        """What the global scheduler sees, now. The same object each time."""
        load, tokens = self._load, self.spec.block_tokens
        load.used = (self.spec.blocks - self.free) * tokens
        load.running = len(self.batch.running) + len(self._prefilling)
        load.waiting = len(self.waiting)
        head = self.waiting[0] if self.waiting else None
        load.head_demand = self.blocks_of(head.prompt + head.made) * tokens if head else 0
        load.queued_demand = self._queued_blocks * tokens
        load.moving_in, load.moving_out = self.moving_in, self.moving_out
        return load

    def view(self) -> InstanceView:
        """What it sees of itself, for choosing whom to move. Requests in a prefill step stay."""
        tokens = self.spec.block_tokens
        running = []
        for request in self.batch.running:
            assert isinstance(request, ReplicaRequest)
            usage = self.blocks_of(self.computed(request)) * tokens
            movable = request.migration is None
            running.append(RequestView(request.request_id, usage, execution=request.execution, movable=movable))
        for request in self._prefilling:
            usage = self.blocks_of(request.prompt + request.made) * tokens
            running.append(RequestView(request.request_id, usage, execution=request.execution, movable=False))
        head = self.waiting[:1]
        waiting = [
            RequestView(r.request_id, demand=self.blocks_of(r.prompt + r.made) * tokens, queued=True) for r in head
        ]
        return InstanceView(
            self.name,
            self.spec.capacity,
            running=running,
            waiting=waiting,
            reserved=self.reserved * tokens,
            terminating=self.draining,
            moving_in=self.moving_in,
            moving_out=self.moving_out,
        )

    @property
    def empty(self) -> bool:
        """Nothing runs, waits or is on its way."""
        return not (self.batch.running or self._prefilling or self.waiting or self.moving_in or self.moving_out)
