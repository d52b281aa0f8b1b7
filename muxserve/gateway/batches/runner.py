"""Runs the batches of a fleet in the gateway that holds their lease."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import sqlite3
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from muxserve.gateway.batches.asking import WholeAnswer
from muxserve.gateway.batches.lines import LineError, PlannedLine, answered, body_of, not_asked, planned_lines
from muxserve.gateway.batches.store import LEASE_SECONDS, BatchStore, FullError, LeaseLostError, StoredBatch

log = logging.getLogger(__name__)

# So often it is looked whether there is room, while there is something to ask; and whether there is something.
BUSY_SECONDS = 0.2
IDLE_SECONDS = 2.0
RENEW_SECONDS = LEASE_SECONDS / 5
TIDY_SECONDS = 600.0
# A refused request is asked again after the time that the answer names, or after this, twice as long each time.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# Lines of a batch for one model that are in memory: as many as are asked at a time, and some more.
PORTION = 256
# How often one that the server fails is asked.
MOST_FAILURES = 3
_AGAIN = frozenset({408, 429, 503})


class BatchWork(Protocol):
    """What the runner needs of its gateway."""

    def model_of(self, batch: StoredBatch, asked: str | None) -> str:
        """The model that a request of `batch` for the name `asked` is for.

        Raises:
            ValueError: there is none for whoever made the batch; the message says which there are.
        """

    def is_revoked(self, batch: StoredBatch) -> bool:
        """Whether the key that made `batch` was revoked."""

    def draining(self) -> bool:
        """Whether this gateway ends, and begins nothing."""

    async def ask(self, batch: StoredBatch, body: bytes) -> WholeAnswer:
        """The answer to a request of `batch`."""


class BatchRoom(Protocol):
    """What says how many requests may begin (`muxserve.gateway.batches.loads`)."""

    def began(self, model: str) -> None:
        """A request is asked."""

    def ended(self, model: str) -> None:
        """It has ended."""

    async def look(self) -> None:
        """See how every model stands."""

    def room(self, model: str) -> int:
        """How many more may begin."""


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch that is asked: lines by model that may be asked now, those that wait until a time of the loop's clock,
    and the tasks of those that have no answer yet. `unread` has, by model, the number of the last line that was read,
    where there are more."""

    batch: StoredBatch
    ready: dict[str, deque[PlannedLine]] = field(default_factory=dict)
    later: list[tuple[float, int, PlannedLine]] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    tries: Counter[int] = field(default_factory=Counter)
    unread: dict[str, int] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether every line has its result."""
        return not self.unread and not self.tasks and not self.later and not any(self.ready.values())

    def held(self, model: str) -> int:
        """Lines for `model` that are not being asked."""
        return len(self.ready.get(model, ())) + sum(line.model == model for _, _, line in self.later)

    def read(self, model: str, lines: list[PlannedLine], most: int) -> None:
        """Ask these lines, too, the next ones for `model`; fewer than `most` are the last."""
        for line in lines:
            self.put(line)
        if len(lines) < most:
            del self.unread[model]
        else:
            self.unread[model] = lines[-1].number

    def put(self, line: PlannedLine) -> None:
        """Ask `line` when there is room."""
        self.ready.setdefault(line.model, deque()).append(line)

    def wake(self, now: float) -> None:
        """Those that have waited long enough may be asked."""
        while self.later and self.later[0][0] <= now:
            self.put(heapq.heappop(self.later)[2])


class BatchRunner:
    """Takes the lease if nobody has it, and asks the lines of open batches in turns, as far as there is room."""

    def __init__(self, store: BatchStore, work: BatchWork, loads: BatchRoom) -> None:
        self._store = store
        self._work = work
        self._loads = loads
        self._running: dict[str, RunningBatch] = {}
        self._wake = asyncio.Event()
        self._mine = False
        self._numbers = itertools.count()

    def look(self) -> None:
        """Something is new: look at once."""
        self._wake.set()

    async def run(self) -> None:
        """Run batches, for ever; when the task is cancelled, what has no answer yet is left to the next runner."""
        renewing = asyncio.create_task(self._keep_lease())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BUSY_SECONDS if self._running else IDLE_SECONDS):
                        await self._wake.wait()
                self._wake.clear()
                if not self._mine:
                    await self._drop_all()
                    continue
                try:
                    await self._step()
                except LeaseLostError:
                    log.warning("another gateway runs the batches by now")
                    self._mine = False
                except (sqlite3.Error, OSError) as error:
                    log.error("batches cannot go on at present: %s", error)
        finally:
            renewing.cancel()
            await self._drop_all()

    async def _keep_lease(self) -> None:
        tidied = -1e9
        now = asyncio.get_running_loop().time
        while True:
            try:
                asks = self._mine and any(each.tasks for each in self._running.values())
                if self._work.draining() and not asks:
                    self._mine = False
                    await asyncio.to_thread(self._store.release)
                else:  # another gateway would ask again what is being answered
                    had, self._mine = self._mine, await asyncio.to_thread(self._store.claim)
                    if self._mine and not had:
                        self.look()
                    if self._mine and now() - tidied > TIDY_SECONDS:
                        tidied = now()
                        await asyncio.to_thread(self._store.tidy)
            except (sqlite3.Error, OSError) as error:
                log.error("batches cannot be kept at present: %s", error)
            await asyncio.sleep(RENEW_SECONDS)

    async def _step(self) -> None:
        """Do what there is to do now."""
        open_batches = await asyncio.to_thread(self._store.open_batches)
        known = {batch.id for batch in open_batches}
        for name in [name for name in self._running if name not in known]:
            await self._drop(name)
        for batch in open_batches:
            try:
                await self._advance(batch)
            except (LeaseLostError, sqlite3.Error, OSError):
                raise
            except Exception:  # the others go on
                log.exception("batch %s cannot go on at present", batch.id)
        if any(any(each.ready.values()) for each in self._running.values()) and not self._work.draining():
            await self._loads.look()
            self._begin_lines()

    async def _advance(self, batch: StoredBatch) -> None:
        """Bring a batch to its next state, if it has come so far."""
        if batch.status in ("validating", "in_progress") and self._work.is_revoked(batch):
            log.info("batch %s is cancelled: the key %s is revoked", batch.id, batch.key)
            await asyncio.to_thread(self._store.cancel, batch.id)
            self.look()
        elif batch.status == "cancelling":
            await self._end(batch, "cancelled", "batch_cancelled", "the batch was cancelled before this was asked")
        elif batch.status != "finalizing" and self._store.clock() >= batch.expires_at:
            words = "this could not be answered before the completion window of the batch ended"
            await self._end(batch, "expired", "batch_expired", words)
        elif batch.status == "validating":
            await self._validate(batch)
            self.look()
        elif batch.status == "in_progress":
            await self._go_on(batch)
        elif batch.status == "finalizing":
            await self._end(batch, "completed", "server_error", "the server has lost this")

    async def _validate(self, batch: StoredBatch) -> None:
        def check() -> tuple[list[PlannedLine], list[LineError]]:
            with open(self._store.path(batch.input_file_id), "rb") as file:
                return planned_lines(file, batch.endpoint, partial(self._work.model_of, batch))

        try:
            lines, errors = await asyncio.to_thread(check)
        except FileNotFoundError:
            lines, errors = [], [LineError("file_not_found", f"{batch.input_file_id} is there no longer")]
        if not errors:
            try:
                await asyncio.to_thread(self._store.begin, batch.id, lines)
            except FullError as error:
                errors = [LineError("too_many_open_requests", str(error))]
        if errors:
            await asyncio.to_thread(self._store.fail, batch.id, errors)

    async def _go_on(self, batch: StoredBatch) -> None:
        running = self._running.get(batch.id)
        if running is None:
            models = await asyncio.to_thread(self._store.models, batch.id)
            running = self._running[batch.id] = RunningBatch(batch, unread=dict.fromkeys(models, -1))
        running.wake(asyncio.get_running_loop().time())
        for model, last in [*running.unread.items()]:
            if running.held(model) < PORTION:
                read = partial(self._store.pending, batch.id, model, last, PORTION)
                running.read(model, await asyncio.to_thread(read), PORTION)
        if running.is_done:
            del self._running[batch.id]
            await asyncio.to_thread(self._store.finalizing, batch.id)
            self.look()

    async def _end(self, batch: StoredBatch, status: str, code: str, words: str) -> None:
        await self._drop(batch.id)

        def left(line: PlannedLine) -> str:
            return not_asked(_name(batch, line), line.custom_id, code, words)

        await asyncio.to_thread(self._store.end, batch, status, left)
        log.info("batch %s is %s", batch.id, status)

    # ------------------------------------------------------------ lines

    def _begin_lines(self) -> None:
        """Begin as many as there is room for, a line of each batch in turn."""
        for running, model in self._in_turns():
            line = running.ready[model].popleft()
            self._loads.began(model)
            task = asyncio.create_task(self._ask(running, line))
            running.tasks.add(task)
            task.add_done_callback(partial(self._ended, running, line))

    def _in_turns(self) -> Iterator[tuple[RunningBatch, str]]:
        """Batches and models that have a line which may begin."""
        found = True
        while found:
            found = False
            for running in [*self._running.values()]:
                for model in [model for model, lines in running.ready.items() if lines]:
                    if self._loads.room(model) > 0:
                        found = True
                        yield running, model
                        break
        # Another batch is the first the next time.
        if self._running:
            first = next(iter(self._running))
            self._running[first] = self._running.pop(first)

    def _ended(self, running: RunningBatch, line: PlannedLine, task: asyncio.Task[None]) -> None:
        running.tasks.discard(task)
        self._loads.ended(line.model)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, LeaseLostError):
                self._mine = False
            else:
                log.error("line %d of batch %s failed", line.number + 1, running.batch.id, exc_info=error)
                self._again(running, line, FIRST_PAUSE)
        self.look()

    async def _ask(self, running: RunningBatch, line: PlannedLine) -> None:
        batch = running.batch
        text = await asyncio.to_thread(self._store.read, batch.input_file_id, line.offset, line.length)
        answer = await self._work.ask(batch, body_of(text))
        running.tries[line.number] += 1
        tries = running.tries[line.number]
        if answer.status in _AGAIN or (answer.status >= 500 and tries < MOST_FAILURES):
            pause = max(answer.retry_after, FIRST_PAUSE * 2 ** min(tries, 10))
            self._again(running, line, min(LONGEST_PAUSE, pause))
            return
        result = answered(_name(batch, line), line.custom_id, answer.status, answer.request_id, answer.body)
        save: Callable[[], None] = partial(self._store.finish, batch.id, line.number, answer.status == 200, result)
        await _until_written(partial(asyncio.to_thread, save))

    def _again(self, running: RunningBatch, line: PlannedLine, pause: float) -> None:
        at = asyncio.get_running_loop().time() + pause
        heapq.heappush(running.later, (at, next(self._numbers), line))

    # ------------------------------------------------------------ ends

    async def _drop(self, name: str) -> None:
        """Ask no further line of a batch, and wait for none."""
        running = self._running.pop(name, None)
        if running is None:
            return
        tasks = list(running.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drop_all(self) -> None:
        await asyncio.gather(*(self._drop(name) for name in [*self._running]))


async def _until_written(write: Callable[[], Awaitable[None]]) -> None:
    """An answer is not asked for again because a disk was full for a moment."""
    pause = FIRST_PAUSE
    while True:
        try:
            await write()
            return
        except sqlite3.Error as error:
            log.error("a result of a batch cannot be written: %s", error)
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE, 2 * pause)


def _name(batch: StoredBatch, line: PlannedLine) -> str:
    return f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}"
