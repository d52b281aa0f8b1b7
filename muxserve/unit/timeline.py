"""What a unit's engines computed last, for people who look at the fleet: a bounded ring of jobs and of moves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from muxserve.scheduling.types import WHOLE
from muxserve.wire import ComputedJob, MovedRequest, TimelineReply

# Reports of one engine that follow one another make one job, up to this length: who draws it sees no difference.
LONGEST_SECONDS = 0.25
GAP_SECONDS = 0.005
# At LONGEST_SECONDS, half a minute of 34 engines that never pause. With more of them it reaches back less far.
MOST_JOBS = 4096
MOST_MOVES = 1024


@dataclass(slots=True)
class _Job:
    """Steps of one engine, end to end. Seconds of the unit's clock; `share` in millionths."""

    number: int
    model: str
    phase: str
    share: int
    start: float
    end: float
    steps: int
    tokens: int


class UnitTimeline:
    """The jobs of engines. It hears every report, and so extends only the engine's last job, or appends one."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque(maxlen=MOST_JOBS)
        self._last: dict[str, _Job] = {}
        self._moves: deque[MovedRequest] = deque(maxlen=MOST_MOVES)
        self._count = 0

    def computed(
        self, engine: str, model: str, phase: str, share: int, seconds: float, steps: int, tokens: int, now: float
    ) -> None:
        """An engine reported at `now` that it computed for so many `seconds`, under a lease of `share` millionths."""
        job = self._last.get(engine)
        start = now - seconds
        if job is not None:
            # A report may have waited; two jobs of one engine never overlap.
            start = max(start, job.end)
            if (
                start - job.end < GAP_SECONDS
                and now - job.start < LONGEST_SECONDS
                and job.share == share
                and job.phase == phase
            ):
                job.end, job.steps, job.tokens = now, job.steps + steps, job.tokens + tokens
                return
        self._count += 1
        job = _Job(self._count, model, phase, share, start, now, steps, tokens)
        self._last[engine] = job
        self._jobs.append(job)

    def moved(self, model: str, destination: str, seconds: float, now: float) -> None:
        """A request has moved to another unit; it stood still for so many `seconds`."""
        self._moves.append(MovedRequest(now, model, destination, seconds))

    def since(self, epoch: str, since: float, now: float) -> TimelineReply:
        """What ended after `since`, the oldest first. A job that goes on comes again, under the same number."""
        # From the newest on, so that what is old costs nothing.
        jobs: list[ComputedJob] = []
        for job in reversed(self._jobs):
            # Engines report one after the other: who began earlier may have ended later, but not by more than this.
            if job.end <= since - LONGEST_SECONDS:
                break
            if job.end > since:
                share = job.share / WHOLE
                jobs.append(
                    ComputedJob(job.number, job.model, job.phase, share, job.start, job.end, job.steps, job.tokens)
                )
        moves = [move for move in self._moves if move.at > since]
        return TimelineReply(epoch, now, jobs[::-1], moves)
