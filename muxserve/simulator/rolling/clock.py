"""What all arrangements have in common: the clock, the engines, and the requests' lives."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from muxserve.costs import EngineCosts, LatencyModel
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.rolling.engine import Engine
from muxserve.simulator.rolling.requests import PhasedRequest
from muxserve.simulator.rolling.result import PhasedResult
from muxserve.workload.trace import TraceRequest


class StuckError(RuntimeError):
    """Requests wait and nothing will ever serve them."""


class Arrangement:
    """Engines of one model, and who gets what. Subclasses say where a request goes (`place`) and hear of its life.

    Raises:
        CostError: the latency model does not know the model on that device.
    """

    def __init__(self, spec: InstanceSpec, latency: LatencyModel) -> None:
        self.spec = spec
        self.costs: EngineCosts = latency.engine(spec.architecture, spec.shape)
        self.engines: dict[str, Engine] = {}
        self.result = PhasedResult()
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._open = 0
        self._enders: dict[str, Callable[[float], None]] = {}

    # ------------------------------------------------------------ for subclasses

    def place(self, request: PhasedRequest, now: float) -> None:
        """A new request, or one that was preempted, must go somewhere."""
        raise NotImplementedError

    def stepped(self, engine: Engine, now: float) -> None:
        """A step of that engine has ended; the next one has not begun."""

    def prefilling(self, engine: Engine, requests: Sequence[PhasedRequest], now: float, end: float) -> None:
        """See `engine.Told`."""

    def prefilled(self, engine: Engine, requests: Sequence[PhasedRequest], now: float, seconds: float) -> None:
        """See `engine.Told`."""

    def decoded(self, engine: Engine) -> None:
        """See `engine.Told`."""

    def finished(self, engine: Engine, request: PhasedRequest, now: float) -> None:
        """See `engine.Told`."""
        self._open -= 1

    def preempted(self, engine: Engine, request: PhasedRequest, now: float) -> None:
        """See `engine.Told`. It is computed again where it was, before others."""
        engine.enqueue(request, first=True)

    def add(self, engine: Engine) -> None:
        """An engine comes up."""
        self.engines[engine.name] = engine
        self._enders[engine.name] = self._ender(engine)

    def at(self, when: float, callback: Callable[[float], None]) -> None:
        """Call back at that time; of the same time in the order of asking."""
        self._serial += 1
        heappush(self._heap, (when, self._serial, callback))

    def kick(self, engine: Engine, now: float) -> None:
        """The engine may have something to do; it begins a step unless it is in one."""
        if not engine.stepping:
            end = engine.begin(now)
            if end is not None:
                self.at(end, self._enders[engine.name])

    # ------------------------------------------------------------ the clock

    def run(self, workload: Iterable[TraceRequest]) -> PhasedResult:
        """Play the workload to its end.

        Raises:
            StuckError: requests wait for what never comes.
        """
        collecting = gc.isenabled()
        # Many small objects and hardly a cycle: collecting costs a third of the time.
        gc.disable()
        try:
            return self._run(workload)
        finally:
            if collecting:
                gc.enable()

    def _run(self, workload: Iterable[TraceRequest]) -> PhasedResult:
        arrivals = enumerate(workload)
        following = next(arrivals, None)
        heap = self._heap
        while following is not None or (self._open and heap):
            if following is not None and (not heap or following[1].arrival <= heap[0][0]):
                number, each = following
                self.now = each.arrival
                self._arrive(number, each)
                following = next(arrivals, None)
            else:
                self.now, _, callback = heappop(heap)
                callback(self.now)
        if self._open:
            raise StuckError(f"{self._open} requests wait at {self.now:.3f} s and nothing will serve them")
        result = self.result
        result.seconds = max((r.finish for r in result.requests if r.finish is not None), default=0.0)
        result.preemptions = sum(engine.preemptions for engine in self.engines.values())
        result.busy = {name: engine.busy for name, engine in self.engines.items()}
        result.prefill_busy = {name: engine.prefill_busy for name, engine in self.engines.items()}
        return result

    def _arrive(self, number: int, each: TraceRequest) -> None:
        request = PhasedRequest(str(number), each.model, self.now, each.prompt_tokens, each.output_tokens)
        self.result.requests.append(request)
        needed = each.prompt_tokens + each.output_tokens
        if needed > self.spec.capacity:
            request.error = f"{needed} tokens, and an instance has room for {self.spec.capacity}"
            return
        self._open += 1
        self.place(request, self.now)

    def _ender(self, engine: Engine) -> Callable[[float], None]:
        def end(now: float) -> None:
            engine.end(now)
            engine.stepping = False
            self.stepped(engine, now)
            self.kick(engine, now)

        return end
