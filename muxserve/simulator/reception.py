"""Requests on their way to a queue, where the gateway that receives them shares its cores with engines.

One process receives them, one after another. It mostly sleeps, so that the kernel lets it run at once when a request
comes: engines are slowed by it, and it is not slowed by them. What a request costs beyond that is done when it has
ended, and what a lease costs when an engine gets one: nobody waits for it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator

from muxserve.costs import LatencyModel, Load
from muxserve.costs.front_end import FrontEndWork, apart
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
    spread: float = 0.0,
    seed: int = 0,
) -> None:
    """Play `requests`: each comes `delay` seconds after it was sent, or, where it is received on the `cores` of the
    engines and costs these something, when that is done, which takes as long in the mean, with that `spread`.

    Raises:
        SimulationError: nothing can make progress.
    """
    _, work = apart(latency)
    if cores is None or work is None or not work.request:
        clock.run(requests, arrive, delay)
    else:
        reception = cores.reception = Reception(clock, cores, work, delay, arrive, spread, seed)
        clock.run(requests, reception.sent, 0.0)


class Reception:
    """Receives requests on the cores of `compute`, each in `delay` seconds, in the mean with the standard deviation
    `spread` (of a log-normal distribution), and hands it to `arrive`. `work` is what a request costs in all, and a
    lease of an engine that had none."""

    def __init__(
        self,
        clock: Clock,
        compute: Compute,
        work: FrontEndWork,
        delay: float,
        arrive: Callable[[SimRequest, float], None],
        spread: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._clock = clock
        self._compute = compute
        self._arrive = arrive
        self._delay = delay
        # Of the logarithm. Each simulation with this seed draws the same.
        self._sigma = math.sqrt(math.log(1.0 + (spread / delay) ** 2)) if delay else 0.0
        self._random = random.Random(f"requests {seed}")
        part = min(MOST, work.request / delay) if delay else MOST
        # Seconds after the end of a request, and after a lease.
        self._after = max(0.0, work.request / part - delay)
        self._lease = work.lease / part
        self.load = Load(0.0, 0.0, part)
        self._queue: deque[SimRequest] = deque()
        # Seconds as of `_at` that are to be done for leases and requests that have ended, while none is received.
        self.behind = self._at = 0.0
        # What was planned for an end that is not the one as of now is not done.
        self._version = 0

    @property
    def active(self) -> bool:
        """It has something to do."""
        return bool(self._queue) or self.behind > 0.0

    def _drawn(self) -> float:
        sigma = self._sigma
        return self._delay * math.exp(sigma * self._random.gauss(0.0, 1.0) - sigma**2 / 2.0) if sigma else self._delay

    def sent(self, request: SimRequest, now: float) -> None:
        """A client sends a request."""
        self._works(now)
        self._queue.append(request)
        if len(self._queue) == 1:
            self._goes_on(now + self._drawn())

    def ended(self, now: float) -> None:
        """A request has its last token."""
        self._owes(self._after, now)

    def leased(self, now: float) -> None:
        """An engine that had no lease gets one."""
        self._owes(self._lease, now)

    def _owes(self, seconds: float, now: float) -> None:
        if seconds:
            self._works(now)
            self.behind += seconds
            if not self._queue:
                self._goes_on(now + self.behind)

    def _works(self, now: float) -> None:
        """Account for what was done until now while no request was received."""
        if not self._queue and self.behind:
            self.behind = max(0.0, self.behind - (now - self._at))
        self._at = now

    def _goes_on(self, end: float) -> None:
        self._compute.changes()
        self._plan(end)

    def _plan(self, end: float) -> None:
        self._version += 1
        version = self._version

        def ends(now: float) -> None:
            if version == self._version:
                self._ends(now)

        self._clock.at(end, ends)

    def _ends(self, now: float) -> None:
        """The first request is received, or nothing else is to be done."""
        self._at = now
        if self._queue:
            self._arrive(self._queue.popleft(), now)
        else:
            self.behind = 0.0
        if self.active:
            self._plan(now + (self._drawn() if self._queue else self.behind))
        else:
            self._compute.changes()
