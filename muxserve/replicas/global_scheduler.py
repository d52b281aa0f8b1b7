"""The global scheduler of one model's instances: dispatch, pairing and scaling over what the instances report.

It takes events and the time and answers decisions; live and simulated clusters drive the same object. It knows no
request but those that wait for an instance, so a new one has its view back with the next reports.
"""

from __future__ import annotations

from muxserve.replicas.decisions import (
    Decision,
    Dispatch,
    Drain,
    RefuseRequest,
    Resume,
    Start,
    StopInstance,
    not_ready,
    too_long,
)
from muxserve.replicas.dispatch import DispatchPolicy, DispatchQueue, FreestOfQueues, NewRequest
from muxserve.replicas.migration import MigrationRules, Pairing
from muxserve.replicas.priorities import DEFAULT_LEVELS, Levels
from muxserve.replicas.scaling import Scaler, ScalingRules
from muxserve.replicas.views import InstanceLoad
from muxserve.replicas.virtual_usage import score


class GlobalScheduler:
    """Decides for the instances of `model`.

    Args:
        dispatch: how a request's instance is chosen; by default the freest, whole queues counted.
        migration: None: requests stay where they are.
        scaling: None: the instances stay as they are; somebody else wakes them and puts them to sleep.
        wake_limit: without `scaling`, for how many seconds a request waits for an instance; None: without end.
    """

    def __init__(
        self,
        model: str,
        levels: Levels = DEFAULT_LEVELS,
        dispatch: DispatchPolicy | None = None,
        migration: MigrationRules | None = None,
        scaling: ScalingRules | None = None,
        wake_limit: float | None = None,
    ) -> None:
        self.model = model
        self.levels = levels
        self.starting = 0
        self.queue = DispatchQueue(levels)
        self._policy = dispatch or FreestOfQueues(levels)
        self._pairing = Pairing(migration) if migration else None
        self._scaler = Scaler(scaling) if scaling else None
        self._wake_limit = scaling.wake_limit if scaling else wake_limit
        self._loads: dict[str, InstanceLoad] = {}
        # Draining because of the load, and because somebody has asked for it.
        self._draining: set[str] = set()
        self._leaving: set[str] = set()
        # Loads of serving instances; None after one has come, gone or changed sides.
        self._serving: list[InstanceLoad] | None = None

    @property
    def pairs(self) -> dict[str, str]:
        """Source -> destination."""
        return self._pairing.pairs if self._pairing else {}

    # ------------------------------------------------------------ events of instances

    def up(self, load: InstanceLoad) -> None:
        """An instance is ready to serve: one that was started, or that a new scheduler finds."""
        self.starting = max(0, self.starting - 1)
        self.report(load)

    def report(self, load: InstanceLoad) -> None:
        """An instance says how it stands. The object is kept and scored; who reports may change it and report it again.

        Whether it is terminating is taken from its first report; from then on this scheduler decides it, whatever an
        instance says that has not heard of it yet.
        """
        name = load.name
        known = self._loads.get(name)
        if known is not load:
            if known is None and load.terminating:
                self._draining.add(name)
            self._loads[name] = load
            self._serving = None
        load.terminating = name in self._draining or name in self._leaving
        score(load, self.levels)

    def down(self, name: str) -> None:
        """An instance is gone, stopped or dead."""
        self._policy.gone(name)
        self._loads.pop(name, None)
        self._draining.discard(name)
        self._leaving.discard(name)
        self._serving = None

    def start_failed(self) -> None:
        """An instance that was to start has not; another attempt is decided on as the load asks for it."""
        self.starting = max(0, self.starting - 1)

    def drain(self, name: str) -> list[Decision]:
        """Somebody wants the instance drained; it is not resumed by itself."""
        load = self._loads.get(name)
        if load is None or name in self._leaving:
            return []
        self._leaving.add(name)
        if name in self._draining:
            self._draining.discard(name)
            return []
        self._mark(load, True)
        return [Drain(name)]

    def retire(self, name: str) -> list[Decision]:
        """Somebody wants the instance drained, and may have it stay after all (`resume`)."""
        load = self._loads.get(name)
        if load is None or load.terminating:
            return []
        self._draining.add(name)
        self._mark(load, True)
        return [Drain(name)]

    def resume(self, name: str) -> list[Decision]:
        """An instance that was to retire stays."""
        load = self._loads.get(name)
        if load is None or name not in self._draining:
            return []
        self._draining.discard(name)
        self._mark(load, False)
        return [Resume(name)]

    # ------------------------------------------------------------ events of requests

    def arrive(self, now: float, request: NewRequest) -> list[Decision]:
        """A request comes in, or one comes back that an instance could not keep.

        Raises:
            PriorityError: one of its priorities is not declared.
        """
        self.levels[request.execution]
        self.queue.push(request, now)
        return self.dispatch(now)

    def cancel(self, request_id: str) -> bool:
        """A request that waits for an instance is not wanted any more; False: it does not wait here."""
        return self.queue.remove(request_id)

    def dispatch(self, now: float) -> list[Decision]:
        """Send away what waits, as far as there are instances."""
        decisions: list[Decision] = []
        if not self.queue:
            return decisions
        if not self._candidates() and not self.starting:
            decisions += self._scale(now)
        loads = self._candidates()
        if not loads:
            return decisions
        smallest = min(load.capacity for load in loads)
        held_back: list[tuple[NewRequest, float]] = []
        while (popped := self.queue.pop()) is not None:
            request, since = popped
            fitting = loads
            if request.demand > smallest:
                fitting = [load for load in loads if load.capacity >= request.demand]
            if not fitting and self.starting:
                held_back.append((request, since))  # one that comes up may be larger
                continue
            if not fitting:
                largest = max(load.capacity for load in loads)
                decisions.append(RefuseRequest(request.request_id, too_long(self.model, request.demand, largest)))
                continue
            chosen = self._policy.choose(fitting, request)
            chosen.enqueue(request.demand)
            score(chosen, self.levels)
            decisions.append(Dispatch(request.request_id, chosen.name))
        for request, since in held_back:
            self.queue.push(request, since)
        return decisions

    def tick(self, now: float) -> list[Decision]:
        """One round: pairs for migration, scaling, and requests that have waited for too long."""
        decisions: list[Decision] = []
        if self._pairing:
            decisions += self._pairing.round(self._loads.values())
        decisions += self._expire(now)
        decisions += self._scale(now)
        return decisions + self.dispatch(now)

    # ------------------------------------------------------------ inside

    def _candidates(self) -> list[InstanceLoad]:
        if self._serving is None:
            self._serving = [load for load in self._loads.values() if not load.terminating]
        return self._serving

    def _expire(self, now: float) -> list[Decision]:
        limit = self._wake_limit
        if limit is None or not self.queue:
            return []
        late = [request for request, since in self.queue if now - since >= limit]
        for request in late:
            self.queue.remove(request.request_id)
        reason = not_ready(self.model, limit)
        return [RefuseRequest(request.request_id, reason, late=True) for request in late]

    def _scale(self, now: float) -> list[Decision]:
        decisions: list[Decision] = [StopInstance(name) for name in sorted(self._leaving) if self._loads[name].idle]
        if not self._scaler:
            return decisions + [StopInstance(name) for name in sorted(self._draining) if self._loads[name].idle]
        staying = [load for name, load in self._loads.items() if name not in self._leaving]
        for change in self._scaler.decide(now, staying, self.starting, len(self.queue)):
            if isinstance(change, Start):
                self.starting += change.count
            elif isinstance(change, Drain):
                self._draining.add(change.instance)
                self._mark(self._loads[change.instance], True)
            elif isinstance(change, Resume):
                self._draining.discard(change.instance)
                self._mark(self._loads[change.instance], False)
            decisions.append(change)
        return decisions

    def _mark(self, load: InstanceLoad, terminating: bool) -> None:
        load.terminating = terminating
        self._serving = None
        score(load, self.levels)
