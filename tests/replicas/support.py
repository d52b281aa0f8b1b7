"""Instances to decide about."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from muxserve.replicas.migration import MigrationRules, Pairing, choose_request
from muxserve.replicas.priorities import DEFAULT_LEVELS, Level, Levels
from muxserve.replicas.views import InstanceLoad, InstanceView, RequestView
from muxserve.replicas.virtual_usage import score

CAPACITY = 10_000
THREE = Levels((Level("interactive", 2, 1_500), Level("normal", 1, 6_000), Level("batch", 0)))


def request(name: str, usage: int, execution: str = "normal", movable: bool = True) -> RequestView:
    return RequestView(name, usage, execution=execution, movable=movable)


def waiting(name: str, demand: int) -> RequestView:
    return RequestView(name, demand=demand, queued=True)


def load(name: str, used: int = 0, running: int = 0, **more: object) -> InstanceLoad:
    return score(InstanceLoad(name, CAPACITY, used=used, running=running, **more), DEFAULT_LEVELS)  # type: ignore[arg-type]


def freeness_of(instance: InstanceView, levels: Levels) -> float:
    """Algorithm 1, CalcFreeness, request by request."""
    if instance.terminating:
        return -math.inf
    total = sum(_virtual_usage(request, instance, levels) for request in instance.running)
    if instance.waiting:
        total += instance.waiting[0].demand
    return (instance.capacity - instance.reserved - total) / max(1, len(instance.running))


def _virtual_usage(request: RequestView, instance: InstanceView, levels: Levels) -> float:
    """Algorithm 1, CalcVirtualUsage and GetHeadroom, of a running request."""
    headroom = levels[request.execution].headroom(instance.capacity, levels.auto)
    return request.usage + headroom / sum(each.execution == request.execution for each in instance.running)


usages = st.integers(0, 1_500)
requests_strategy = st.lists(st.tuples(usages, st.sampled_from([level.name for level in THREE])), max_size=12)


@st.composite
def instances(draw: st.DrawFn, name: str = "i", terminating: bool | None = None) -> InstanceView:
    """Any instance; sometimes fuller than it can be, which a view may be while blocks grow."""
    running = [request(f"{name}/{n}", usage, level) for n, (usage, level) in enumerate(draw(requests_strategy))]
    queue = [waiting(f"{name}/w{n}", demand) for n, demand in enumerate(draw(st.lists(usages, max_size=4)))]
    return InstanceView(
        name,
        draw(st.integers(1, 20_000)),
        running=running,
        waiting=queue,
        reserved=draw(st.integers(0, 2_000)),
        terminating=draw(st.booleans()) if terminating is None else terminating,
    )


def rebalance(views: list[InstanceView], rules: MigrationRules, levels: Levels = THREE, rounds: int = 200) -> int:
    """Migrate, each move at once, until nothing moves any more; returns how many moved. Queues take what fits.

    Raises:
        AssertionError: requests still move after so many rounds.
    """
    by_name = {view.name: view for view in views}
    pairing, moved = Pairing(rules), 0
    for _ in range(rounds):
        pairing.round([score(view.load(), levels) for view in views])
        before = moved
        for source, destination in pairing.pairs.items():
            one, other = by_name[source], by_name[destination]
            chosen = choose_request(one, other.load(), rules, levels)
            if chosen is not None:
                assert chosen.usage <= other.load().room
                one.running = [each for each in one.running if each is not chosen]
                other.running = [*other.running, chosen]
                moved += 1
        for view in views:
            while view.waiting and not view.terminating and view.waiting[0].demand <= view.load().room + _head(view):
                first, *rest = view.waiting
                first.queued, first.usage = False, first.demand
                view.waiting, view.running = rest, [*view.running, first]
                moved += 1
        if moved == before:
            return moved
    raise AssertionError(f"still moving after {rounds} rounds")


def _head(view: InstanceView) -> int:
    return view.waiting[0].demand
