"""The clock of a cluster: arrivals, steps, migrations and instances that come and go, and who decides about them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from muxserve.costs import LatencyModel
from muxserve.replicas.decisions import Decision, Dispatch, Drain, Pair, Refuse, Resume, Start, Stop
from muxserve.replicas.dispatch import NewRequest
from muxserve.replicas.global_scheduler import GlobalScheduler
from muxserve.replicas.migration import choose_request
from muxserve.simulator.instances.instance import IDLE, STOPPED, Instance
from muxserve.simulator.instances.migration import Migration
from muxserve.simulator.instances.requests import ReplicaRequest
from muxserve.simulator.instances.result import ClusterResult
from muxserve.simulator.instances.setup import InstanceSpec, ReplicaOptions
from muxserve.workload.trace import TraceRequest

# (scheduling, execution) priority of the n-th request.
PriorityOf = Callable[[int], tuple[str, str]]
# No request takes that long: with nothing but rounds of the global scheduler for so many seconds, nothing ever moves.
_STUCK_SECONDS = 10_000.0


class StuckError(RuntimeError):
    """Requests wait and nothing will ever serve them."""


class Cluster:
    """Instances of one model under a global scheduler.

    Raises:
        CostError: the latency model does not know the model on that device.
    """

    def __init__(self, spec: InstanceSpec, latency: LatencyModel, options: ReplicaOptions | None = None) -> None:
        self.spec = spec
        self.options = options = options or ReplicaOptions()
        self.now = 0.0
        self.instances: dict[str, Instance] = {}
        self.result = ClusterResult([])
        self.scheduler = GlobalScheduler(
            spec.architecture.name,
            options.levels,
            options.dispatch(options.levels),
            options.migration,
            options.scaling,
        )
        self._costs = latency.engine(spec.architecture, spec.shape)
        self._token_bytes = float(spec.architecture.kv_bytes_per_token(spec.shape.dtype))
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._names = 0
        self._open = 0
        self._requests: dict[str, ReplicaRequest] = {}
        self._reported = -1.0
        self._progress = 0.0
        for _ in range(options.instances):
            self._up(0.0, 0.0)

    # ------------------------------------------------------------ the clock

    def at(self, when: float, callback: Callable[[float], None]) -> None:
        """Call back at that time; of the same time in the order of asking."""
        self._serial += 1
        heappush(self._heap, (when, self._serial, callback))

    def run(self, workload: Iterable[TraceRequest], priorities: PriorityOf | None = None) -> ClusterResult:
        """Play the workload to its end.

        Raises:
            StuckError: requests wait for an instance that never comes.
            PriorityError: `priorities` names an unknown level.
        """
        arrivals = enumerate(workload)
        following = next(arrivals, None)
        if self.options.migration or self.options.scaling:
            self.at(self.options.tick, self._tick)
        heap = self._heap
        while following is not None or self._open:
            if following is not None and (not heap or following[1].arrival <= heap[0][0]):
                number, each = following
                self.now = self._progress = each.arrival
                self._arrive(number, each, priorities)
                following = next(arrivals, None)
            elif heap:
                self.now, _, callback = heappop(heap)
                callback(self.now)
            else:
                break
        if self._open:
            raise StuckError(f"{self._open} requests wait at {self.now:.3f} s and no instance will take them")
        return self._summarise()

    def kick(self, instance: Instance, now: float) -> None:
        """See `migration.Clock`."""
        if instance.state == IDLE:
            self._step(instance, now)

    def drain(self, name: str, now: float) -> None:
        """Somebody wants that instance drained."""
        self._apply(self.scheduler.drain(name), now)

    def _step(self, instance: Instance, now: float) -> None:
        end = instance.begin(now)
        if end is not None:
            self.at(end, instance.on_end)

    def _ender(self, instance: Instance) -> Callable[[float], None]:
        """What happens at the end of each of the instance's steps."""

        def end(now: float) -> None:
            self._progress = now
            instance.end(now)
            self._step(instance, now)

        return end

    # ------------------------------------------------------------ requests

    def _arrive(self, number: int, each: TraceRequest, priorities: PriorityOf | None) -> None:
        now, levels = self.now, self.options.levels
        scheduling, execution = priorities(number) if priorities else (levels.default, levels.default)
        request = ReplicaRequest(
            str(number), each.model, now, each.prompt_tokens, each.output_tokens, scheduling, execution
        )
        request.rank = levels[scheduling].rank
        self.result.requests.append(request)
        if each.prompt_tokens + each.output_tokens > self.spec.capacity:
            request.error = f"{each.prompt_tokens + each.output_tokens} tokens, {self.spec.capacity} fit an instance"
            return
        self._requests[request.request_id] = request
        self._open += 1
        self._report(now)
        self._dispatch(request, now)

    def _dispatch(self, request: ReplicaRequest, now: float) -> None:
        tokens = self.spec.block_tokens
        demand = -(-(request.prompt + request.made) // tokens) * tokens
        new = NewRequest(request.request_id, demand, request.arrival, request.scheduling, request.execution)
        self._apply(self.scheduler.arrive(now, new), now)

    def _finished(self, request: ReplicaRequest, now: float) -> None:
        request.finish = now
        del self._requests[request.request_id]
        self._open -= 1

    # ------------------------------------------------------------ the global scheduler

    def _report(self, now: float) -> None:
        if self.options.stale and now - self._reported < self.options.stale:
            return
        self._reported = now
        for instance in self.instances.values():
            self.scheduler.report(instance.load())

    def _tick(self, now: float) -> None:
        if now - self._progress > _STUCK_SECONDS:
            return
        self._report(now)
        self._apply(self.scheduler.tick(now), now)
        for source in list(self.scheduler.pairs):
            self._pump(source, now)
        self.at(now + self.options.tick, self._tick)

    def _apply(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            match decision:
                case Dispatch(request_id, name):
                    instance = self.instances[name]
                    instance.enqueue(self._requests[request_id])
                    self.kick(instance, now)
                case Refuse(request_id, reason):
                    self._requests.pop(request_id).error = reason
                    self._open -= 1
                case Start(count):
                    for _ in range(count):
                        self.at(now + self.options.start_seconds, self._starter(now))
                case Drain(name):
                    instance = self.instances[name]
                    instance.draining = True
                    for request in instance.withdraw_all():
                        self._dispatch(request, now)
                case Resume(name):
                    self.instances[name].draining = False
                case Stop(name):
                    self._stop(name, now)
                case Pair() | _:
                    # Sources ask for their destination whenever they may move a request.
                    pass

    def _starter(self, decided: float) -> Callable[[float], None]:
        def up(now: float) -> None:
            self._up(decided, now)
            self._apply(self.scheduler.dispatch(now), now)

        return up

    def _up(self, decided: float, now: float) -> None:
        self._names += 1
        name = f"i{self._names:04d}"
        slowdown = self.options.copying.slowdown
        instance = Instance(name, self._names, self.spec, self._costs, self.options.levels, slowdown, self._finished)
        instance.on_end = self._ender(instance)
        instance.started = decided
        self.instances[name] = instance
        self.result.started += 1
        self.result.peak = max(self.result.peak, len(self.instances))
        self.scheduler.up(instance.load())

    def _stop(self, name: str, now: float) -> None:
        instance = self.instances[name]
        if not instance.empty:
            # Something reached it since it was last looked at.
            return
        del self.instances[name]
        instance.state = STOPPED
        self._account(instance, now)
        self.scheduler.down(name)

    # ------------------------------------------------------------ migration

    def _pump(self, name: str, now: float) -> None:
        """Let a source move its next request."""
        rules = self.options.migration
        source = self.instances.get(name)
        destination = self.instances.get(self.scheduler.pairs.get(name, ""))
        if rules is None or source is None or destination is None or source.moving_out >= rules.in_flight:
            return
        load = destination.load()
        load.terminating = load.terminating or destination.draining
        chosen = choose_request(source.view(), load, rules, self.options.levels, growth=2 * self.spec.block_tokens)
        if chosen is not None:
            request = self._requests[chosen.request_id]
            costs, token_bytes = self.options.copying, self._token_bytes
            Migration(self, costs, token_bytes, request, source, destination).begin(now)

    def moved(self, migration: Migration, arrived: bool, now: float) -> None:
        """See `migration.Clock`."""
        result = self.result
        if not arrived:
            result.aborted += 1
            return
        result.migrations += 1
        result.downtimes.append(now - migration.down_since)
        result.copy_seconds.append(now - migration.began)
        self._pump(migration.source.name, now)

    # ------------------------------------------------------------ the end

    def _account(self, instance: Instance, now: float) -> None:
        result = self.result
        result.instance_seconds += now - instance.started
        result.steps += instance.steps
        result.busy_seconds += instance.busy
        result.preemptions += instance.preemptions

    def _summarise(self) -> ClusterResult:
        result = self.result
        ends = [r.finish for r in result.requests if r.finish is not None]
        result.seconds = max(ends, default=0.0)
        for instance in self.instances.values():
            self._account(instance, max(result.seconds, instance.started))
        return result


def simulate(
    spec: InstanceSpec,
    latency: LatencyModel,
    workload: Iterable[TraceRequest],
    options: ReplicaOptions | None = None,
    priorities: PriorityOf | None = None,
) -> ClusterResult:
    """Play `workload` on instances of `spec`. The same arguments give the same result.

    Raises:
        CostError, StuckError, PriorityError: as `Cluster` and `Cluster.run`.
    """
    cluster = Cluster(spec, latency, options)
    collecting = gc.isenabled()
    # Many small objects and hardly a cycle: collecting costs a third of the time.
    gc.disable()
    try:
        return cluster.run(workload, priorities)
    finally:
        if collecting:
            gc.enable()
