"""What the policies see of an instance (a replica), in tokens of KV.

Two views, as in Llumnix: the global scheduler sees a handful of numbers of each instance (`InstanceLoad`); only the
instance itself sees its requests one by one (`InstanceView`) and chooses which of them move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from muxserve.replicas.priorities import NORMAL


@dataclass(slots=True)
class RequestView:
    """One request on an instance.

    `usage` is what its KV takes, whole blocks, 0 while it is queued; `demand` is what it needs to start. A request that
    is not `movable` is being moved already, or must stay.
    """

    request_id: str
    usage: int = 0
    demand: int = 0
    queued: bool = False
    scheduling: str = NORMAL
    execution: str = NORMAL
    movable: bool = True


@dataclass(slots=True)
class InstanceView:
    """An instance as it sees itself. `waiting` is in the order in which it will be served; `reserved` is set aside for
    requests on their way in. `moving_in` and `moving_out` count migrations in flight."""

    name: str
    capacity: int
    running: Sequence[RequestView] = ()
    waiting: Sequence[RequestView] = ()
    reserved: int = 0
    terminating: bool = False
    moving_in: int = 0
    moving_out: int = 0

    def load(self) -> InstanceLoad:
        """What it reports to the global scheduler."""
        levels: dict[str, int] = {}
        for request in self.running:
            levels[request.execution] = levels.get(request.execution, 0) + 1
        return InstanceLoad(
            name=self.name,
            capacity=self.capacity,
            used=self.reserved + sum(request.usage for request in self.running),
            running=len(self.running),
            waiting=len(self.waiting),
            head_demand=self.waiting[0].demand if self.waiting else 0,
            queued_demand=sum(request.demand for request in self.waiting),
            levels=levels,
            terminating=self.terminating,
            moving_in=self.moving_in,
            moving_out=self.moving_out,
        )


class InstanceLoad(msgspec.Struct, omit_defaults=True, gc=False):
    """An instance as the global scheduler sees it; units report it as it is.

    `capacity` is M, `used` the tokens that are taken (requests on their way in included), `running` the batch size B.
    `head_demand` is what the first of the `waiting` requests needs, `queued_demand` what all of them need. `levels`
    counts the running requests by execution priority. Only instances of equal `layout` can exchange KV: it is
    equal where block size, layers, heads, head size, type and ranks are. `freeness` is
    filled in by `virtual_usage.score`. A decode step takes `step_seconds` by now (0: not known). `pages` are those of
    the pool that the model's own requests hold, and those that its queue needs.
    """

    name: str
    capacity: int
    model: str = ""
    used: int = 0
    running: int = 0
    waiting: int = 0
    head_demand: int = 0
    queued_demand: int = 0
    levels: dict[str, int] = {}
    terminating: bool = False
    moving_in: int = 0
    moving_out: int = 0
    layout: str = ""
    freeness: float = 0.0
    step_seconds: float = 0.0
    pages: int = 0

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is on its way."""
        return not (self.running or self.waiting or self.moving_in or self.moving_out)

    @property
    def room(self) -> int:
        """Tokens that are neither taken nor what the next request in the queue waits for."""
        return self.capacity - self.used - self.head_demand

    def refresh(self, reported: InstanceLoad) -> InstanceLoad:
        """Bring it up to date; `terminating` and the freeness stay, since the policies decide these."""
        self.model, self.capacity, self.layout = reported.model, reported.capacity, reported.layout
        self.used, self.running, self.waiting = reported.used, reported.running, reported.waiting
        self.head_demand, self.queued_demand = reported.head_demand, reported.queued_demand
        self.levels, self.step_seconds, self.pages = reported.levels, reported.step_seconds, reported.pages
        self.moving_in, self.moving_out = reported.moving_in, reported.moving_out
        return self

    def enqueue(self, demand: int) -> None:
        """A request was sent there that the instance has not reported yet."""
        if not self.waiting:
            self.head_demand = demand
        self.waiting += 1
        self.queued_demand += demand
