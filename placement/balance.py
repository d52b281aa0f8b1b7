"""Items are spread over places so that the worst place is as good as can be found: shifts and swaps out of the worst
place until none helps, from several starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

# How bad a place is that has those items; larger is worse.
Cost = Callable[[Sequence[int]], tuple[float, ...]]
Places = list[list[int]]

STARTS = 25
# So many items are somewhere else at the next start than in the best places.
_SHAKEN = 3


def balanced(start: Sequence[Sequence[int]], cost: Cost, starts: int = STARTS, seed: int = 0) -> Places:
    """The items of `start`, which are numbers, in places of which the worst is better, or as they were."""
    best = _improved([list(items) for items in start], cost)
    worst, draw = max(map(cost, best)), Random(seed)
    for _ in range(starts - 1):
        tried = _improved(_shaken(best, draw), cost)
        if (found := max(map(cost, tried))) < worst:
            best, worst = tried, found
    return best


def _shaken(places: Places, draw: Random) -> Places:
    """The same with some items elsewhere."""
    found = [list(items) for items in places]
    every = sorted(item for items in places for item in items)
    for item in draw.sample(every, k=min(_SHAKEN, len(every))):
        next(items for items in found if item in items).remove(item)
        draw.choice(found).append(item)
    return found


def _improved(places: Places, cost: Cost) -> Places:
    """Shift or swap an item of the worst place, the best first, as long as that leaves both places better than it."""
    costs = [cost(items) for items in places]
    while True:
        worst = costs.index(max(costs))
        best, moved = costs[worst], None
        for here in places[worst]:
            for other, items in enumerate(places):
                for there in (None, *items) if other != worst else ():
                    pair = _exchanged(places[worst], here, there), _exchanged(items, there, here)
                    if (found := max(map(cost, pair))) < best:
                        best, moved = found, (other, pair)
        if moved is None:
            return places
        other, pair = moved
        places[worst], places[other] = pair
        costs[worst], costs[other] = map(cost, pair)


def _exchanged(items: Sequence[int], gone: int | None, come: int | None) -> list[int]:
    """The items without one, and with another."""
    return [item for item in items if item != gone] + ([] if come is None else [come])
