"""What the engines of a unit run on: its devices, pages and clock, and what is measured there.

The machine is the unit as the clock sees it. Who decides what runs is the scheduler (`scheduler`), which the machine
asks once per moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappush
from operator import attrgetter

from muxserve.costs import LatencyModel
from muxserve.costs.step_costs import StepCosts
from muxserve.scheduling.types import PREFILL, WHOLE, Phase
from muxserve.simulator.clock import Clock
from muxserve.simulator.compute import Compute
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.job import BOUNDARY, STEPPING, Job
from muxserve.simulator.pages import UnitPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.result import UnitRecord
from muxserve.simulator.setup import Options, SimModel, SimUnit
from muxserve.simulator.timeline import JobTimeline

_ORDER = attrgetter("order")


class UnitMachine:
    """The devices of one unit, and the engines on them. `turn` decides what runs (set by the scheduler); `ended` hears
    of each request that got its last token, or was refused.

    Raises:
        CostError: the latency model does not know a model or shape of the unit.
    """

    def __init__(
        self, spec: SimUnit, latency: LatencyModel, options: Options, clock: Clock, compute: Compute | None
    ) -> None:
        self.spec = spec
        self.latency = latency
        self.options = options
        self.overheads = options.overheads
        self.load_tolerance = options.load_tolerance
        self.clock = clock
        self.compute = compute or Compute(spec.device, latency, sharing=spec.sharing)
        self.pages = UnitPages(spec)
        self.engines: list[Job] = []
        self.timeline = JobTimeline(spec.name, spec.device, spec.devices) if options.timeline else None
        self.turn: Callable[[float], None] = _decide_nothing
        self.ended: Callable[[SimRequest, float], None] | None = None
        self.turn_due = False
        self.touched = False
        self.number = len(clock.units)
        self.record = UnitRecord(clock.now)
        self._kicks: list[Job] = []
        self._looks: list[Job] = []
        self._costs: dict[tuple[str, float, Phase], StepCosts] = {}
        clock.join(self)
        self.compute.units.append(self)
        if options.sample_seconds > 0.0:
            clock.at(clock.now, _SampleDue(self))

    def add(self, engine: Job) -> None:
        """An engine comes."""
        self.engines.append(engine)
        self.compute.engines.append(engine)

    # ------------------------------------------------------------ requests

    def refuse(self, request: SimRequest, now: float, error: str) -> None:
        """A request ends without an answer."""
        request.error = error
        self.clock.open -= 1
        if self.ended is not None:
            self.ended(request, now)

    def finished(self, request: SimRequest, now: float) -> None:
        """A request has its last token."""
        request.finish = now + self.overheads.token
        self.clock.open -= 1
        self.record.last_end = max(self.record.last_end, request.finish)
        if self.ended is not None:
            self.ended(request, now)

    # ------------------------------------------------------------ what engines ask

    def share(self, model: SimModel, share: int, own: int, phase: Phase) -> float:
        """The part of the devices on which an engine of the model computes under a lease of `share` millionths; `own`
        is what the engine usually has."""
        if model.cost_share is not None:
            return model.cost_share
        if share == own:
            return model.profile.engines.prefill_share if phase is PREFILL else model.profile.engines.decode_share
        return share / WHOLE

    def costs(self, model: SimModel, part: float, phase: Phase) -> StepCosts:
        """Costs of the model's engine of that phase on that part of the devices."""
        key = (model.name, part, phase)
        if key not in self._costs:
            shape = self.spec.shape_of(model, part, phase)
            self._costs[key] = StepCosts(self.latency.engine(model.architecture, shape))
        return self._costs[key]

    def touch(self) -> None:
        """Something is to be done here at this moment."""
        if not self.touched:
            self.touched = True
            self.clock.touch(self)

    def decide_again(self) -> None:
        """Something has changed that calls for a decision."""
        self.turn_due = True
        self.touch()

    def look(self, engine: Job) -> None:
        """What the engine plans has changed."""
        self._looks.append(engine)
        if not self.touched:
            self.touch()

    def at_boundary(self, engine: Job) -> None:
        """The engine could begin a step."""
        self._kicks.append(engine)
        if not self.touched:
            self.touch()

    # ------------------------------------------------------------ the moment

    def moment(self, now: float) -> None:
        """Everything of this moment was told to the one unit of the clock."""
        self.touched = True
        while True:
            if self.turn_due or self._kicks:
                self.begin(now)
            if self.compute.changed:
                self.compute.settle(now)
            if self._looks:
                self._plan_looks()
            if not self.turn_due and not self._kicks:
                return

    def begin(self, now: float) -> None:
        """Everything of this moment was told: decide, and begin steps."""
        if self.turn_due:
            self.turn_due = False
            self.turn(now)
        kicks = self._kicks
        if kicks:
            if len(kicks) > 1:
                kicks.sort(key=_ORDER)
            for engine in kicks:
                if engine.state == BOUNDARY:
                    engine.kick(now)
            kicks.clear()

    def rest(self, now: float) -> None:
        """Jobs have settled on their speeds."""
        if self._looks:
            self._plan_looks()
        self.touched = False
        if self.turn_due or self._kicks:
            self.touch()

    def _plan_looks(self) -> None:
        """Engines whose plans have changed are to be looked at when their steps are over."""
        looks, heap = self._looks, self.clock.heap
        if len(looks) > 1:
            looks = list(dict.fromkeys(looks))
        for engine in looks:
            if engine.state >= STEPPING:
                engine.version += 1
                heappush(heap, (engine.plan(), engine.order, engine.version, engine))
        self._looks.clear()

    def works(self, running: bool, now: float) -> None:
        """Some job of the unit runs, or none."""
        if running != self.record.running:
            self.record.works(running, now)


@dataclass(slots=True)
class _SampleDue(TimedEvent):
    """Page counts are to be recorded."""

    machine: UnitMachine

    def handle(self, now: float) -> None:
        machine = self.machine
        machine.pages.count(now)
        machine.record.samples.append((now, tuple(pages.held for pages in machine.pages.models)))
        machine.clock.at(now + machine.options.sample_seconds, self)


def _decide_nothing(now: float) -> None:
    """There is nobody who decides."""
