"""Dispatch policies that `FreestOfQueues` and `PrefixAware` are compared with.

Freest               Llumnix's Algorithm 1: the instance with the highest freeness
RoundRobinDispatch   one after the other
LoadAware            INFaaS++: the least memory in use, queued requests included
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from muxserve.replicas.dispatch import NewRequest
from muxserve.replicas.views import InstanceLoad

_FREENESS = attrgetter("freeness")


class _Forgetful:
    """A policy that knows nothing of instances but how they stand."""

    def gone(self, name: str) -> None:
        """See `DispatchPolicy`."""


class Freest(_Forgetful):
    """The instance with the highest freeness; of equals the first."""

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """See `DispatchPolicy`."""
        return max(loads, key=_FREENESS)


class RoundRobinDispatch(_Forgetful):
    """The next one by name, wherever it stands."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """See `DispatchPolicy`. Remembers a name, not a place, so that instances may come and go."""
        ordered = sorted(loads, key=attrgetter("name"))
        chosen = next((load for load in ordered if load.name > self._last), ordered[0])
        self._last = chosen.name
        return chosen


class LoadAware(_Forgetful):
    """The instance whose memory is least in use: (used + demand of all queued requests) / capacity. So does INFaaS++ in
    Llumnix's evaluation (section 6.1); of equals the one with the fewest requests."""

    def choose(self, loads: Sequence[InstanceLoad], request: NewRequest) -> InstanceLoad:
        """See `DispatchPolicy`."""
        return min(loads, key=_memory_load)


def _memory_load(load: InstanceLoad) -> tuple[float, int]:
    return (load.used + load.queued_demand) / load.capacity, load.running + load.waiting
