"""A unit: its devices, pages and engines, what they ask of it, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush
from operator import attrgetter

from muxserve.costs import EngineCosts, EngineShape, LatencyModel
from muxserve.replicas.views import InstanceLoad
from muxserve.scheduling.types import PREFILL, WHOLE, ModelProfile, Phase
from muxserve.simulator.batch import BlockCounts
from muxserve.simulator.clock import Clock
from muxserve.simulator.compute import Compute
from muxserve.simulator.engine import BOUNDARY, STEPPING, Engine
from muxserve.simulator.pages import ModelPages, SimPool
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.result import EngineUse, UnitResult
from muxserve.simulator.setup import Options, SimModel, SimUnit
from muxserve.simulator.timeline import JobTimeline

_ORDER = attrgetter("order")


class SimulatedUnit:
    """Runs the engines of one unit. Subclasses say what an arrival does, and who decides what runs.

    Raises:
        CostError: the latency model does not know a model or shape of the unit.
    """

    def __init__(
        self,
        spec: SimUnit,
        latency: LatencyModel,
        options: Options | None = None,
        clock: Clock | None = None,
        compute: Compute | None = None,
    ) -> None:
        options = options or Options()
        self.spec = spec
        self.latency = latency
        self.options = options
        self.overheads = options.overheads
        # Seconds from the scheduler to an engine, and back.
        self.way = options.overheads.way
        self.load_tolerance = options.load_tolerance
        self.clock = clock or Clock()
        self.compute = compute or Compute(spec.device, latency)
        self.touched = False
        self.number = len(self.clock.units)
        self.clock.join(self)
        self.compute.units.append(self)
        self.timeline = JobTimeline(spec.name, spec.device, spec.devices) if options.timeline else None
        self.turn_due = False
        self.turns = 0
        self.began = self.clock.now
        self.ended: float | None = None
        self.pools = {profile.name: SimPool(profile) for profile in spec.pools}
        self.pages: list[ModelPages] = []
        self.page_of: dict[str, ModelPages] = {}
        for index, model in enumerate(spec.models):
            profile = model.profile
            block_tokens = profile.block_tokens if model.prefix_caching else 0
            pages = ModelPages(
                index,
                model.name,
                self.pools[profile.pool],
                profile.pages_per_block,
                profile.quota_pages,
                block_tokens,
                self.block_counts(profile),
            )
            self.pages.append(pages)
            self.page_of[model.name] = pages
        self.engines: list[Engine] = []
        self.requests: list[SimRequest] = []
        self._kicks: list[Engine] = []
        self._looks: list[Engine] = []
        self._costs: dict[tuple[str, float], EngineCosts] = {}
        self._longest = {model.name: model.max_len or float("inf") for model in spec.models}
        self._samples: list[tuple[float, tuple[int, ...]]] = []
        self._active = False
        self._active_since = 0.0
        self._busy = 0.0
        self._last_end = 0.0
        if options.sample_seconds > 0.0:
            self.clock.at(self.clock.now, self._sample)
        self._begin()

    def block_counts(self, profile: ModelProfile) -> BlockCounts:
        """How the blocks of a model's sequences are counted."""
        return BlockCounts.of(profile)

    def _begin(self) -> None:
        """Make the engines, and what decides on them."""
        raise NotImplementedError

    def _add(self, engine: Engine) -> None:
        self.engines.append(engine)
        self.compute.engines.append(engine)

    # ------------------------------------------------------------ requests

    def arrive(self, request: SimRequest, now: float) -> None:
        """A request comes to the unit."""
        self.requests.append(request)
        request.unit = self.spec.name
        if self.too_long(request):
            longest = self._longest[request.model]
            self.refuse(request, now, f"longer than the {longest:.0f} tokens of {request.model}")
        else:
            self.enqueue(request, now)

    def too_long(self, request: SimRequest) -> bool:
        """Whether it is longer than its model can be asked for."""
        return request.prompt + request.output > self._longest[request.model]

    def enqueue(self, request: SimRequest, now: float) -> None:
        """A request is to be served."""
        raise NotImplementedError

    def load(self, name: str) -> InstanceLoad:
        """How its replica of that model stands, as the global scheduler sees it."""
        raise NotImplementedError

    def refuse(self, request: SimRequest, now: float, error: str) -> None:
        """A request ends without an answer."""
        request.error = error
        self.clock.open -= 1

    def finished(self, request: SimRequest, now: float) -> None:
        """A request has its last token."""
        request.finish = now + self.overheads.token
        self.clock.open -= 1
        self._last_end = max(self._last_end, request.finish)

    # ------------------------------------------------------------ what engines ask

    def costs(self, model: SimModel, share: int, own: int, phase: Phase) -> EngineCosts:
        """Costs of the model's engine on `share` millionths of the unit; `own` is what the engine usually has."""
        if model.cost_share is not None:
            part = model.cost_share
        elif share == own:
            part = model.profile.prefill_share if phase is PREFILL else model.profile.decode_share
        else:
            part = share / WHOLE
        key = (model.name, part)
        if key not in self._costs:
            shape = EngineShape(self.spec.device, self.spec.tp, part, model.dtype, model.graphs)
            self._costs[key] = self.latency.engine(model.architecture, shape)
        return self._costs[key]

    def touch(self) -> None:
        """Something is to be done here at this moment."""
        if not self.touched:
            self.touched = True
            self.clock.touch(self)

    def look(self, engine: Engine) -> None:
        """What the engine plans has changed."""
        self._looks.append(engine)
        if not self.touched:
            self.touch()

    def at_boundary(self, engine: Engine) -> None:
        """The engine could begin a step."""
        self._kicks.append(engine)
        if not self.touched:
            self.touch()

    def freed(self, pages: ModelPages, now: float) -> None:
        """Pages came free; who could use them is asked anyway."""

    def releasing(self, pages: ModelPages, now: float) -> None:
        """Decoding sequences are about to give pages back."""

    def victim(self, running: Sequence[SimRequest]) -> SimRequest:
        """Which of the sequences gives way first; the last to have joined."""
        return running[-1]

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

    def turn(self, now: float) -> None:
        """Decide what runs."""

    def works(self, running: bool, now: float) -> None:
        """Some job of the unit runs, or none."""
        if running != self._active:
            if running:
                self._active_since = now
            else:
                self._busy += now - self._active_since
            self._active = running

    # ------------------------------------------------------------ what is measured

    def _sample(self, now: float) -> None:
        self._count_pages(now)
        self._samples.append((now, tuple(pages.held for pages in self.pages)))
        self.clock.at(now + self.options.sample_seconds, self._sample)

    def _count_pages(self, now: float) -> None:
        """Bring page counts up to date; steps that begin at this moment have not begun."""
        for pages in self.pages:
            if pages.committed and pages.grower is not None:
                pages.grower.sync(now, -1)

    def result(self) -> UnitResult:
        """What happened, once all requests have ended."""
        if self._active:
            self._busy += self.clock.now - self._active_since
            self._active_since = self.clock.now
        spec = self.spec
        return UnitResult(
            unit=spec.name,
            device=spec.device,
            devices=len(spec.devices),
            phases=spec.phases,
            models=tuple(model.name for model in spec.models),
            seconds=max(self._last_end, self.requests[-1].arrival if self.requests else 0.0),
            busy_seconds=self._busy,
            requests=self.requests,
            engines=[EngineUse(e.model.name, str(e.phase), e.jobs, e.tokens, e.busy_seconds) for e in self.engines],
            pool_pages={pool.profile.name: pool.profile.pages for pool in self.pools.values()},
            pages=self._samples,
            peak_pages=tuple(pages.peak for pages in self.pages),
            turns=self.turns,
            looks=sum(engine.looks for engine in self.engines),
            began=self.began,
            ended=self.ended,
            timelines=[self.timeline] if self.timeline is not None else [],
        )
