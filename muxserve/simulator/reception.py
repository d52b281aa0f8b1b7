"""Requests on their way to a queue, where the gateway that receives them shares its cores with engines.

One process receives them, one after another. Each takes as long as one takes that comes alone (`delay`), and longer
while engines want the cores as well; it slows these down in turn. What a request costs beyond that is done when it has
ended, and nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from muxserve.costs import LatencyModel, Load
from muxserve.costs.front_end import apart
from muxserve.simulator.clock import Clock, Compute
from muxserve.simulator.requests import SimRequest

# What one process can have of the cores: one of two, on which this was measured.
MOST = 0.5


def receive(
    clock: Clock,
    cores: Compute | None,
    latency: LatencyModel,
    requests: Iterator[SimRequest],
    arrive: Callable[[SimRequest, float], None],
    delay: float,
) -> None:
    """Play `requests`: each comes `delay` seconds after it was sent, or, where it is received on the `cores` of the
    engines and costs these something, when that is done.

    Raises:
        SimulationError: nothing can make progress.
    """
    _, work = apart(latency)
    if cores is None or work is None or not work.request:
        clock.run(requests, arrive, delay)
    else:
        reception = cores.reception = Reception(clock, cores, work.request, delay, arrive)
        clock.run(requests, reception.sent, 0.0)


class Reception:
    """Receives requests on the cores of `compute`, and hands each to `arrive`. Alone, one is received in `delay`
    seconds; in all it costs `work` seconds of all cores."""

    def __init__(
        self, clock: Clock, compute: Compute, work: float, delay: float, arrive: Callable[[SimRequest, float], None]
    ) -> None:
        self._clock = clock
        self._compute = compute
        self._arrive = arrive
        self._delay = delay
        part = min(MOST, work / delay) if delay else MOST
        self._after = max(0.0, work / part - delay)
        self.load = Load(0.0, part)
        self._queue: deque[SimRequest] = deque()
        # Seconds alone as of `_at`: what the first one still takes, and what is to be done for those that have ended.
        self._left = self.behind = self._at = 0.0
        self._slow = 1.0
        # What was planned for an end that is not the one as of now is not done.
        self._version = 0

    @property
    def active(self) -> bool:
        """It has something to do."""
        return bool(self._queue) or self.behind > 0.0

    def sent(self, request: SimRequest, now: float) -> None:
        """A client sends a request."""
        if self._queue:
            self._queue.append(request)
            return
        self._works(now)
        self._queue.append(request)
        self._left = self._delay
        self._goes_on()

    def ended(self, now: float) -> None:
        """A request has its last token."""
        if self._after:
            self._works(now)
            self.behind += self._after
            if not self._queue:
                self._goes_on()

    def retime(self, slow: float, now: float) -> None:
        """From now on everything takes `slow` times as long as alone."""
        if slow != self._slow:
            self._works(now)
            self._slow = slow
            self._plan()

    def _works(self, now: float) -> None:
        """Account for what was done until now."""
        done = (now - self._at) / self._slow
        self._at = now
        if self._queue:
            self._left = max(0.0, self._left - done)
        elif self.behind:
            self.behind = max(0.0, self.behind - done)

    def _goes_on(self) -> None:
        self._compute.changes()
        self._plan()

    def _plan(self) -> None:
        self._version += 1
        version = self._version

        def ends(now: float) -> None:
            if version == self._version:
                self._ends(now)

        self._clock.at(self._at + (self._left if self._queue else self.behind) * self._slow, ends)

    def _ends(self, now: float) -> None:
        """The first request is received, or all is done for those that have ended."""
        self._at = now
        if self._queue:
            self._arrive(self._queue.popleft(), now)
            self._left = self._delay
        else:
            self.behind = 0.0
        if self.active:
            self._plan()
        else:
            self._compute.changes()
