"""The clock and the events of one unit, and what its jobs do to each other.

At one moment everything happens in this order: steps end (engines in their order), messages and arrivals come in, the
scheduler takes its turn, engines begin their next steps (in their order), and jobs that now run side by side settle on
their new speeds. So what is computed does not depend on how often an engine is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from muxserve.costs import EngineCosts, EngineShape, LatencyModel
from muxserve.metrics.records import RequestRecord
from muxserve.scheduling.types import WHOLE, Phase
from muxserve.simulator.leaps import BOUNDARY, STEPPING, Engine
from muxserve.simulator.pages import ModelPages, SimPool
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import Options, SimModel, SimUnit
from muxserve.simulator.timeline import Timeline
from muxserve.workload.trace import TraceRequest

# Actions come after the steps that end at the same time.
_AFTER_ENGINES = 1 << 20
_ORDER = attrgetter("order")
# No step takes that long: when nothing has run for so many seconds with all arrivals in, nothing ever will.
_STUCK_SECONDS = 10_000.0


class SimulationError(ValueError):
    """The simulation cannot be run, or does not get on; the message says why."""


@dataclass(slots=True)
class EngineUse:
    """What one engine did: jobs (steps), tokens computed, seconds in which a job of it ran."""

    model: str
    phase: str
    jobs: int
    tokens: int
    busy_seconds: float


@dataclass(slots=True)
class UnitResult:
    """What happened in a unit. `seconds` is from the start of the workload to the end of the last request;
    `busy_seconds` those in which any job ran. `pages` samples pages in use: time and counts in the order of `models`;
    `peak_pages` is the most that each held. `turns` counts the scheduler's decisions, `looks` the events simulated."""

    unit: str
    device: str
    devices: int
    models: tuple[str, ...]
    seconds: float
    busy_seconds: float
    records: list[RequestRecord]
    engines: list[EngineUse]
    pool_pages: dict[str, int]
    pages: list[tuple[float, tuple[int, ...]]]
    peak_pages: tuple[int, ...]
    turns: int
    looks: int
    timeline: Timeline | None = field(default=None, repr=False)

    @property
    def jobs(self) -> int:
        """Engine steps."""
        return sum(engine.jobs for engine in self.engines)


class World:
    """Runs the engines of one unit. Subclasses say what an arrival does, and who decides what runs.

    Raises:
        CostError: the latency model does not know a model or shape of the unit.
    """

    def __init__(self, unit: SimUnit, latency: LatencyModel, options: Options | None = None) -> None:
        options = options or Options()
        self.unit = unit
        self.latency = latency
        self.options = options
        self.overheads = options.overheads
        self.load_tolerance = options.load_tolerance
        self.timeline = Timeline(unit.name, unit.device, unit.devices) if options.timeline else None
        self.now = 0.0
        self.jobs_changed = False
        self.turn_due = False
        # Nothing but renewals of leases is to be decided on.
        self.calm = False
        self.turns = 0
        self.looks = 0
        self.open = 0
        self.pools = {profile.name: SimPool(profile) for profile in unit.pools}
        self.pages: list[ModelPages] = []
        for index, model in enumerate(unit.models):
            profile = model.profile
            self.pages.append(ModelPages(index, self.pools[profile.pool], profile.pages_per_block, profile.quota_pages))
        self.engines: list[Engine] = []
        self._heap: list[tuple[float, int, int, Engine | Callable[[float], None]]] = []
        self._serial = _AFTER_ENGINES
        self._kicks: list[Engine] = []
        self._looks: list[Engine] = []
        self._costs: dict[tuple[str, float], EngineCosts] = {}
        self._longest = {model.name: model.max_len or float("inf") for model in unit.models}
        self._samples: list[tuple[float, tuple[int, ...]]] = []
        self._active = 0
        self._active_since = 0.0
        self._busy = 0.0
        self._last_end = 0.0

    # ------------------------------------------------------------ what engines ask

    def costs(self, model: SimModel, share: int, own: int, phase: Phase) -> EngineCosts:
        if model.cost_share is not None:
            part = model.cost_share
        elif share == own:
            part = model.profile.prefill_share if phase is Phase.PREFILL else model.profile.decode_share
        else:
            part = share / WHOLE
        key = (model.name, part)
        if key not in self._costs:
            shape = EngineShape(self.unit.device, self.unit.tp, part, model.dtype)
            self._costs[key] = self.latency.engine(model.architecture, shape)
        return self._costs[key]

    def look(self, engine: Engine) -> None:
        self._looks.append(engine)

    def at_boundary(self, engine: Engine) -> None:
        self._kicks.append(engine)

    def freed(self, pages: ModelPages, now: float) -> None:
        """Pages came free; who could use them is asked anyway."""

    def finished(self, request: SimRequest, now: float) -> None:
        request.finish = now + self.overheads.token
        self.open -= 1
        self._last_end = max(self._last_end, request.finish)

    # ------------------------------------------------------------ the clock

    def at(self, time: float, action: Callable[[float], None]) -> None:
        """Do something at a time."""
        self._serial += 1
        heappush(self._heap, (time, self._serial, 0, action))

    def run(self, workload: Iterable[TraceRequest]) -> UnitResult:
        """Play `workload`, requests of the unit's models in order of arrival, until every request has ended.

        Raises:
            SimulationError: a request names no model of the unit, arrivals fall, or nothing can make progress.
        """
        requests: list[SimRequest] = []
        arrivals = iter(workload)
        delay = self.overheads.request
        heap, kicks = self._heap, self._kicks
        looked_at = 0.0
        following = self._next(arrivals, requests)
        due = following.arrival + delay if following is not None else float("inf")
        if self.options.sample_seconds > 0.0:
            self.at(0.0, self._sample)
        while following is not None or self.open:
            if heap and heap[0][0] <= due:
                now = heap[0][0]
            elif following is not None:
                now = due
            else:
                raise SimulationError(self._stuck())
            self.now = now
            while heap and heap[0][0] <= now:
                _, _, version, what = heappop(heap)
                if isinstance(what, Engine):
                    if what.version == version:
                        looked_at = now
                        self.looks += 1
                        what.boundary(now)
                elif following is None and now - looked_at > _STUCK_SECONDS:
                    raise SimulationError(self._stuck())
                else:
                    what(now)
            while due <= now:
                assert following is not None
                looked_at = now
                self.open += 1
                if following.prompt + following.output > self._longest[following.model]:
                    longest = self._longest[following.model]
                    self.refuse(following, now, f"longer than the {longest:.0f} tokens of {following.model}")
                else:
                    self.arrive(following, now)
                following = self._next(arrivals, requests)
                due = following.arrival + delay if following is not None else float("inf")
            turned = self.turn_due
            if turned:
                self.turn_due = False
                self.turn(now)
            stirred = turned or (self.calm and bool(kicks))
            if kicks:
                if len(kicks) > 1:
                    kicks.sort(key=_ORDER)
                for engine in kicks:
                    if engine.state == BOUNDARY:
                        engine.kick(now)
                kicks.clear()
            if self.jobs_changed:
                self.jobs_changed = False
                self._settle(now)
            if stirred:
                self.rest(now)
            if self._looks:
                self._push()
        return self._result(requests)

    def arrive(self, request: SimRequest, now: float) -> None:
        """A request comes in."""
        raise NotImplementedError

    def turn(self, now: float) -> None:
        """Decide what runs."""

    def rest(self, now: float) -> None:
        """Everything of this moment has happened."""

    def refuse(self, request: SimRequest, now: float, error: str) -> None:
        """A request ends without an answer."""
        request.error = error
        self.open -= 1

    def _next(self, arrivals: Iterable[TraceRequest], requests: list[SimRequest]) -> SimRequest | None:
        each = next(iter(arrivals), None)
        if each is None:
            return None
        if each.model not in self._longest:
            raise SimulationError(f"the workload asks for model {each.model!r}, which unit {self.unit.name} has not")
        if requests and each.arrival < requests[-1].arrival:
            raise SimulationError(f"the workload's arrivals fall: {each.arrival} s after {requests[-1].arrival} s")
        request = SimRequest(str(len(requests)), each.model, each.arrival, each.prompt_tokens, each.output_tokens)
        requests.append(request)
        return request

    def _push(self) -> None:
        looks, heap = self._looks, self._heap
        if len(looks) > 1:
            looks = list(dict.fromkeys(looks))
        for engine in looks:
            if engine.state < STEPPING:
                continue
            engine.version += 1
            heappush(heap, (engine.plan(), engine.order, engine.version, engine))
        self._looks.clear()

    def _settle(self, now: float) -> None:
        """The set of running jobs, or what they ask of the device, has changed."""
        running = [engine for engine in self.engines if engine.active]
        if bool(running) != bool(self._active):
            if running:
                self._active_since = now
            else:
                self._busy += now - self._active_since
        self._active = len(running)
        if len(running) == 1:
            engine = running[0]
            if engine.slow != 1.0:
                engine.retime(1.0, now)
            return
        device, slowdown = self.unit.device, self.latency.slowdown
        loads = [engine.load for engine in running]
        for index, engine in enumerate(running):
            slow = slowdown(device, loads[index], (*loads[:index], *loads[index + 1 :]))
            if slow != engine.slow:
                engine.retime(slow, now)

    # ------------------------------------------------------------ what is measured

    def _sample(self, now: float) -> None:
        self._count_pages(now)
        self._samples.append((now, tuple(pages.held for pages in self.pages)))
        self.at(now + self.options.sample_seconds, self._sample)

    def _count_pages(self, now: float) -> None:
        """Bring page counts up to date; steps that begin at this moment have not begun."""
        for pages in self.pages:
            if pages.committed and pages.grower is not None:
                pages.grower.sync(now, -1)

    def _stuck(self) -> str:
        return f"unit {self.unit.name}: {self.open} requests wait at {self.now:.3f} s and nothing runs"

    def _result(self, requests: list[SimRequest]) -> UnitResult:
        if self._active:
            self._busy += self.now - self._active_since
        return UnitResult(
            unit=self.unit.name,
            device=self.unit.device,
            devices=self.unit.tp,
            models=tuple(model.name for model in self.unit.models),
            seconds=max(self._last_end, requests[-1].arrival if requests else 0.0),
            busy_seconds=self._busy,
            records=[request.record() for request in requests],
            engines=[EngineUse(e.model.name, str(e.phase), e.jobs, e.tokens, e.busy_seconds) for e in self.engines],
            pool_pages={pool.profile.name: pool.profile.pages for pool in self.pools.values()},
            pages=self._samples,
            peak_pages=tuple(pages.peak for pages in self.pages),
            turns=self.turns,
            looks=self.looks,
            timeline=self.timeline,
        )
