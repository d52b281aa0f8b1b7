"""How many requests of batches may be in service. Pure: no socket, no clock.

Batches have the room that others leave. Their requests wait behind all others in every queue, but what runs beside
others makes the steps of these longer, and a request that was begun is not stopped for one that comes later. So:

    1  Something is queued, whoever sent it: no further request of a batch begins.
    2  Somebody else is served, or was a moment ago, by this model or by one in the same unit:
       2a  the objective of one of them is missed: none begins;
       2b  a model that sleeps is not woken: that would take memory from the others;
       2c  else few are in service, of all models of the unit together.
    3  Nobody else is there: half of what the engines take is in service, so that the first who comes finds room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Part of an engine's sequences that batches may have beside others, and without them.
BESIDE_OTHERS = 1 / 16
ALONE = 1 / 2
# So long after the last request of a client it is as if it was still there.
QUIET_SECONDS = 2.0
# Part of requests that meet their objectives, below which these are missed.
OBJECTIVES_MET = 0.95


@dataclass(frozen=True, slots=True)
class ModelTraffic:
    """A model as one moment finds it.

    Args:
        seats: sequences that its engines take at once.
        queued: requests that wait for an engine, those of batches included.
        others: requests in service that are of no batch.
        batch: requests of batches in service.
        quiet_seconds: for how long there were no others.
        met: part of the others that met their objectives in the last minute; 1 without objectives.
        asleep: a request would have to wake it.
    """

    seats: int
    queued: int = 0
    others: int = 0
    batch: int = 0
    quiet_seconds: float = 1e9
    met: float = 1.0
    asleep: bool = False

    @property
    def busy(self) -> bool:
        """Whether it serves others."""
        return self.others > 0 or self.quiet_seconds < QUIET_SECONDS


def room(load: ModelTraffic, beside: Iterable[ModelTraffic] = ()) -> int:
    """How many more requests of batches may begin.

    Args:
        load: the model that they are for.
        beside: the other models of its units.
    """
    unit = [load, *beside]
    if any(each.queued for each in unit):  # 1
        return 0
    if any(each.busy for each in unit):
        if load.asleep or any(each.busy and each.met < OBJECTIVES_MET for each in unit):  # 2a, 2b
            return 0
        few = max(1, int(load.seats * BESIDE_OTHERS))
        return max(0, few - sum(each.batch for each in unit))  # 2c
    return max(0, max(1, int(load.seats * ALONE)) - load.batch)  # 3
