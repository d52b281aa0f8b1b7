"""The open loop: every request is sent at its own time, whatever became of those before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from muxserve.metrics import RequestRecord, percentile
from muxserve.replay.dialect import Dialect
from muxserve.replay.endpoint import Endpoint, EndpointAnswer
from muxserve.replay.prompts import Prompts
from muxserve.workload import TraceRequest


@dataclass
class Counts:
    """The replay as it stands; `elapsed` is in seconds of the workload's clock."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    waiting: int = 0
    output_tokens: int = 0
    short: int = 0
    held: int = 0
    began: float = field(default_factory=perf_counter)
    lateness: list[float] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        """Sent and not ended."""
        return self.sent - self.completed - self.failed

    @property
    def elapsed(self) -> float:
        """Seconds since the first moment of the workload."""
        return perf_counter() - self.began


@dataclass(frozen=True)
class Lateness:
    """How much later than planned the client sent its requests, seconds; those held back by `max_in_flight` excluded.
    It is the client's own fault and bounds how far its measurements can be trusted."""

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Lateness | None:
        """Statistics of the lateness of each request, seconds; None without any."""
        if not values:
            return None
        return cls(sum(values) / len(values), percentile(values, 0.5), percentile(values, 0.99), max(values))

    def disturbs(self, latency_p50: float) -> bool:
        """Whether the latencies measured are doubtful: 1 % of the requests were late by more than 5 ms and more than a
        twentieth of a typical latency."""
        return self.p99 > max(0.005, latency_p50 / 20)


class Replay:
    """One replay. `run` does it; `stop` ends it early.

    Args:
        endpoint: opened.
        dialects: model -> how it is asked.
        on_record: called with each request's record when it has ended.
        max_in_flight: more requests wait here, and their waiting counts as latency. None: no bound.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        dialects: Mapping[str, Dialect],
        prompts: Prompts,
        on_record: Callable[[RequestRecord], None],
        max_in_flight: int | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._dialects = dialects
        self._prompts = prompts
        self._on_record = on_record
        self._slots = asyncio.Semaphore(max_in_flight) if max_in_flight else None
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts = Counts()

    @property
    def stopped(self) -> bool:
        """`stop` was called."""
        return self._stopped.is_set()

    def stop(self, now: bool = False) -> None:
        """Send nothing more; with `now` also give up the requests that are under way, which count as unfinished."""
        self._stopped.set()
        if now:
            for task in self._tasks:
                task.cancel()

    async def run(self, requests: Iterable[TraceRequest]) -> None:
        """Send all of `requests`, in order of arrival, and wait for their answers."""
        self.counts = Counts()
        began = self.counts.began
        for number, request in enumerate(requests, start=1):
            # What can be prepared is prepared before the request is due.
            dialect = self._dialects[request.model]
            body = dialect.body(self._prompts, number, request.model, request.prompt_tokens, request.output_tokens)
            await self._until(began + request.arrival)
            held = await self._slot()
            if self.stopped:
                break
            self.counts.sent += 1
            task = asyncio.create_task(self._one(request, dialect, body, began, held))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _until(self, due: float) -> None:
        # Even when behind, let answers be read in between.
        await asyncio.sleep(0)
        while not self.stopped and (left := due - perf_counter()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._stopped.wait()

    async def _slot(self) -> bool:
        """Whether the request had to wait for others."""
        if self._slots is None:
            return False
        held = self._slots.locked()
        if held:
            self.counts.held += 1
            slot = asyncio.ensure_future(self._slots.acquire())
            stop = asyncio.ensure_future(self._stopped.wait())
            await asyncio.wait({slot, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not slot.done():
                slot.cancel()
        else:
            await self._slots.acquire()
        return held

    async def _one(self, request: TraceRequest, dialect: Dialect, body: bytes, began: float, held: bool) -> None:
        record = RequestRecord(request.model, request.arrival, request.prompt_tokens, request.output_tokens)
        try:
            if not held:
                self.counts.lateness.append(max(0.0, perf_counter() - began - request.arrival))
            answer = await self._endpoint.send(dialect, body)
            self._count(request, answer)
            _fill(record, answer, began)
        except asyncio.CancelledError:
            # Given up by `stop`: the record stays unfinished.
            self.counts.failed += 1
        finally:
            if self._slots is not None:
                self._slots.release()
        self._on_record(record)

    def _count(self, request: TraceRequest, answer: EndpointAnswer) -> None:
        if answer.error:
            self.counts.failed += 1
            return
        self.counts.completed += 1
        self.counts.output_tokens += answer.tokens
        self.counts.short += answer.tokens < request.output_tokens


def _fill(record: RequestRecord, answer: EndpointAnswer, began: float) -> None:
    if answer.error:
        record.error = answer.error
        return
    assert answer.first is not None
    assert answer.last is not None
    record.first_token, record.finish = answer.first - began, answer.last - began
    record.output_tokens = answer.tokens
    record.prompt_tokens = answer.prompt_tokens or record.prompt_tokens
