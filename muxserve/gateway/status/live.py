"""The fleet from moment to moment: asks units and other gateways, and keeps the jobs of the last half minute."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from muxserve.gateway.http.peers import OtherGateways
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.status.fleet_status import MAX_AGE_SECONDS, TIMEOUT_SECONDS, FleetStatus
from muxserve.gateway.status.measure import Measures
from muxserve.gateway.status.reports import Reports
from muxserve.metrics.live import JOBS_WINDOW_SECONDS, LiveFrame, LiveJob, LiveMove, RecentLoad, live_frame
from muxserve.wire import TimelineReply

# Where a gateway tells the others what it has, on its Unix socket.
OWN_LOAD = "/ui/own"
# A unit's clock that seems to have gone wrong by more than this was started anew with its machine.
CLOCK_SECONDS = 0.5
PATIENCE_SECONDS = 0.25

_loads = msgspec.json.Decoder(dict[str, RecentLoad])
Ask = Callable[[str, float, float], Awaitable[TimelineReply | None]]


class UnitHistory:
    """The jobs and moves of one unit in the last `JOBS_WINDOW_SECONDS`, in Unix time.

    `revision` grows with every answer, so that a page gets only the jobs after the revision that it has seen.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.revision = 0
        self.heard_at = -1e9
        self._since = 0.0
        self._epoch = ""
        self._offset = 0.0
        self._jobs: dict[str, tuple[int, LiveJob]] = {}
        self._moves: deque[tuple[int, LiveMove]] = deque()

    @property
    def since(self) -> float:
        """What is known ends there, by the unit's clock."""
        return self._since

    def take(self, reply: TimelineReply, now: float) -> None:
        """The unit answered; `now` is Unix time."""
        self.revision += 1
        offset = now - reply.now
        # What lies on the way varies from answer to answer: jobs that follow one another must go on doing so.
        if reply.epoch != self._epoch or abs(offset - self._offset) > CLOCK_SECONDS:
            self._epoch, self._offset = reply.epoch, offset
        self._since = reply.now
        for job in reply.jobs:
            key = f"{reply.epoch}.{job.number}"
            start, end = job.start + self._offset, job.end + self._offset
            shown = LiveJob(self.unit, key, job.model, job.phase, job.share, start, end, job.steps, job.tokens)
            # The last of the dictionary is the one that changed last.
            self._jobs.pop(key, None)
            self._jobs[key] = self.revision, shown
        for move in reply.moves:
            at = move.at + self._offset
            self._moves.append((self.revision, LiveMove(self.unit, at, move.model, move.destination, move.seconds)))
        self._forget(now - JOBS_WINDOW_SECONDS)

    def restarted(self) -> None:
        """Another unit scheduler may answer next, with numbers and perhaps a clock of its own."""
        self._since = 0.0

    def after(self, revision: int) -> tuple[list[LiveJob], list[LiveMove]]:
        """What came after that revision."""
        jobs = []
        for changed, job in reversed(self._jobs.values()):
            if changed <= revision:
                break
            jobs.append(job)
        return jobs[::-1], [move for changed, move in self._moves if changed > revision]

    def _forget(self, before: float) -> None:
        while self._jobs:
            key, (_, job) = next(iter(self._jobs.items()))
            if job.end >= before:
                break
            del self._jobs[key]
        while self._moves and self._moves[0][1].at < before:
            self._moves.popleft()


class LiveView:
    """Makes the frames of everybody who looks at the fleet through this gateway.

    Args:
        ask: a unit's timeline since a time of its clock, None if it does not answer within a number of seconds.
        clock: Unix time.
    """

    def __init__(
        self,
        status: FleetStatus,
        reports: Reports,
        limiter: ConcurrencyLimiter,
        measures: Measures,
        peers: OtherGateways,
        ask: Ask,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._status = status
        self._reports = reports
        self._limiter = limiter
        self._measures = measures
        self._peers = peers
        self._ask = ask
        self._clock = clock
        self._histories: dict[str, UnitHistory] = {}
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def draining(self) -> bool:
        """Whether this gateway ends."""
        return self._reports.draining

    def own_load(self) -> dict[str, RecentLoad]:
        """What this gateway has, by model."""
        now = time.monotonic()
        loads = {}
        for model in self._status.fleet.models:
            gate = self._limiter.gates[model.name]
            loads[model.name] = load = self._measures.recent(model.name, now)
            load.running, load.waiting = gate.inside, gate.waiting
        return loads

    async def frame(self, seen: dict[str, int]) -> LiveFrame:
        """What there is now. `seen` has the revision of each unit that the one who asks knows, and is brought up to
        date."""
        others, _, _ = await asyncio.gather(self._other_loads(), self._status.refresh(), self._refresh())
        jobs, moves = [], []
        for name in [*seen]:
            if name not in self._histories:
                del seen[name]
        for name, history in self._histories.items():
            more, moved = history.after(seen.get(name, 0))
            jobs += more
            moves += moved
            seen[name] = history.revision
        return live_frame(self._clock(), self._reports.fleet(), [self.own_load(), *others], jobs, moves)

    async def _other_loads(self) -> list[dict[str, RecentLoad]]:
        texts = await self._peers.ask(OWN_LOAD) if self._peers else {}
        return [_loads.decode(text) for text in texts.values()]

    async def _refresh(self) -> None:
        """Ask each unit, unless somebody else just does."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(self._ask_all())
        # One unit that hangs must not hold up the others; what it says later is in a later frame.
        await asyncio.wait((self._refreshing,), timeout=PATIENCE_SECONDS)

    async def _ask_all(self) -> None:
        names = list(self._status.units)
        self._histories = {name: self._histories.get(name) or UnitHistory(name) for name in names}
        await asyncio.gather(*(self._ask_one(history) for history in self._histories.values()))

    async def _ask_one(self, history: UnitHistory) -> None:
        if self._clock() - history.heard_at < MAX_AGE_SECONDS:
            return
        reply = await self._ask(history.unit, history.since, TIMEOUT_SECONDS)
        if reply is None:
            history.restarted()
            return
        history.heard_at = self._clock()
        history.take(reply, history.heard_at)
