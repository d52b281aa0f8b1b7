"""What happens to a file's requests on their way: malformed ones refused or counted, times put in order, pieces cut."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from msgspec import structs

from muxserve.workload.arrivals import POISSON
from muxserve.workload.errors import TraceError, WorkloadError
from muxserve.workload.readers import FORMATS, NATIVE, RawRequest, ReadOptions
from muxserve.workload.readers.format import Row
from muxserve.workload.trace import open_trace

# Logs are written by many servers: a request may stand a little behind later ones.
REORDER = 4096


@dataclass
class LeftOut:
    """What a reading left out: malformed lines, the first of them in words, and requests by the reason."""

    bad: int = 0
    first_bad: str = ""
    dropped: Counter[str] = field(default_factory=Counter)

    def skip(self, error: TraceError) -> None:
        """Count a malformed line."""
        self.bad += 1
        self.first_bad = self.first_bad or str(error)


@dataclass(frozen=True)
class TraceFile:
    """A file of a known format; `skip_bad` counts malformed lines instead of refusing the file."""

    path: str
    format: str
    reading: ReadOptions
    skip_bad: bool

    @cached_property
    def timed(self) -> bool:
        """Whether it tells when its requests came, judged by the first that is well formed."""
        if self.format == NATIVE:
            return True
        rows = FORMATS[self.format].read(self.path, self.reading)
        return next((row.request.arrival is not None for row in rows if row.request), True)

    def requests(self, left: LeftOut, rate: float | None, seed: int) -> Iterator[RawRequest]:
        """The requests in order of arrival, the first at 0 s (our own format: as written). Those of a file without
        times arrive as a Poisson process of `rate`, drawn from `seed`.

        Raises:
            TraceError: a malformed line, unless they are skipped.
            WorkloadError: the file has no times and there is no rate.
            OSError: the file cannot be read.
        """
        tell = left.skip if self.skip_bad else _refuse
        if self.format == NATIVE:
            with open_trace(self.path, tell) as (_, requests):
                for request in requests:
                    yield RawRequest(*structs.astuple(request))
            return
        rows = self._good(left, tell)
        first = next(rows, None)
        if first is None:
            return
        rows = chain([first], rows)
        if first[1].arrival is None:
            yield from self._given_times(rows, rate, seed)
        else:
            yield from self._in_order(rows, tell)

    def _good(self, left: LeftOut, tell: Callable[[TraceError], None]) -> Iterator[tuple[int, RawRequest]]:
        for row in FORMATS[self.format].read(self.path, self.reading):
            if row.request is None:
                tell(self._error(row))
            elif row.request.prompt_tokens < 1:
                left.dropped["empty prompt"] += 1
            elif row.request.output_tokens < 1:
                left.dropped["no output (it failed when it was recorded)"] += 1
            else:
                yield row.place, row.request

    def _error(self, row: Row) -> TraceError:
        return TraceError(self.path, row.place, row.problem, self._unit())

    def _unit(self) -> str:
        return FORMATS[self.format].unit

    def _given_times(
        self, rows: Iterator[tuple[int, RawRequest]], rate: float | None, seed: int
    ) -> Iterator[RawRequest]:
        if rate is None:
            raise WorkloadError(
                f"{self.path} ({self.format}) does not tell when its requests came; give a rate in requests per second"
            )
        times = POISSON.times(rate, float(1 << 52), random.Random(f"{seed}/arrivals"))
        for (_, request), time in zip(rows, times, strict=False):
            yield request._replace(arrival=time)

    def _in_order(
        self, rows: Iterator[tuple[int, RawRequest]], tell: Callable[[TraceError], None]
    ) -> Iterator[RawRequest]:
        waiting: list[tuple[float, int, RawRequest]] = []
        zero: float | None = None
        before = 0.0

        def out() -> RawRequest:
            nonlocal zero, before
            time, _, request = heapq.heappop(waiting)
            zero = time if zero is None else zero
            before = time
            return request._replace(arrival=time - zero)

        for number, (place, request) in enumerate(rows):
            if request.arrival is None:
                tell(self._error(Row(place, None, "no time, where those before have one")))
            elif zero is not None and request.arrival < before:
                behind = f"it came {before - request.arrival:g} s before one that stands {REORDER} lines above"
                tell(self._error(Row(place, None, f"{behind}; sort the file by time")))
            else:
                heapq.heappush(waiting, (request.arrival, number, request))
                if len(waiting) > REORDER:
                    yield out()
        while waiting:
            yield out()


def _refuse(error: TraceError) -> None:
    raise error from None


def cut(
    requests: Iterator[RawRequest], start: float, duration: float | None, limit: int | None
) -> Iterator[RawRequest]:
    """Those from `start` on for `duration` seconds, at most `limit`; the cut begins at 0 s."""
    count = 0
    for request in requests:
        assert request.arrival is not None
        time = request.arrival - start
        if time < 0:
            continue
        if (duration is not None and time >= duration) or (limit is not None and count >= limit):
            return
        count += 1
        yield request._replace(arrival=time) if start else request
