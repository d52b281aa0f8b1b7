"""Finds measured cells that cannot be right, and says why.

Two tests, both robust against what they look for:

* **order**: a step that does more on less of the device cannot be faster. Where two cells contradict this by more than
  `TOLERANCE`, one is wrong; the cells with the most contradictions are taken out until none is left.
* **neighbours**: the ratio to the roofline changes slowly over the grid. A cell whose ratio is further from the middle
  one of its neighbours' than `LIMIT` times their spread, and than `LEAST` in any case, is wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from muxserve.costs.profile import EngineProfile

TOLERANCE = 0.25
LEAST = math.log(1.4)
LIMIT = 6.0
_FEWEST_NEIGHBOURS = 3

Place = tuple[int, ...]
Key = tuple[float, Place]


@dataclass(frozen=True, slots=True)
class Outlier:
    """A cell that is left out. `expected` is what its neighbours make of it, in seconds."""

    engine: str
    share: float
    phase: str
    place: Place
    seconds: float
    expected: float
    why: str

    def __str__(self) -> str:
        place = " x ".join(map(str, self.place))
        return (
            f"{self.engine}: {self.phase} {place} took {self.seconds * 1e3:.1f} ms where about "
            f"{self.expected * 1e3:.1f} ms were to be expected ({self.why})"
        )


def find_outliers(
    engines: Sequence[EngineProfile], ideal: Callable[[EngineProfile, str, Place], float]
) -> list[Outlier]:
    """Outliers of engines that differ in nothing but their share.

    Args:
        ideal: seconds that the roofline gives for a cell; used for ratios only, so a constant factor does not matter.
    """
    found = []
    for phase in ("prefill", "decode"):
        cells: dict[Key, float] = {}
        for engine in engines:
            if phase == "prefill":
                cells.update({(engine.share, cell.place): cell.seconds for cell in engine.prefill})
            else:
                cells.update({(engine.share, cell.place): cell.seconds for cell in engine.decode})
        by_share = {engine.share: engine for engine in engines}
        ratio = {key: math.log(cells[key] / ideal(by_share[key[0]], phase, key[1])) for key in cells}
        why = _against_order(cells, ratio)
        left = {key: ratio[key] for key in cells if key not in why}
        why |= _against_neighbours(left)
        for key, reason in sorted(why.items()):
            share, place = key
            near = [ratio[other] for other in _neighbours(key, _grid(ratio), ratio) if other not in why]
            usual = math.exp(median(near)) if near else 1.0
            expected = ideal(by_share[share], phase, place) * usual
            found.append(Outlier(str(by_share[share]), share, phase, place, cells[key], expected, reason))
    return found


def _against_order(cells: Mapping[Key, float], ratio: Mapping[Key, float]) -> dict[Key, str]:
    conflicts: defaultdict[Key, set[Key]] = defaultdict(set)
    keys = list(cells)
    limit = 1.0 + TOLERANCE
    shares = sorted({share for share, _ in keys})
    position = {share: i for i, share in enumerate(shares)}
    for less in keys:
        for more in keys:
            if cells[less] <= limit * cells[more] or not 0 <= position[less[0]] - position[more[0]] <= 1:
                continue
            if all(a <= b for a, b in zip(less[1], more[1], strict=True)):
                conflicts[less].add(more)
                conflicts[more].add(less)
    why = {}
    usual = median(ratio.values()) if ratio else 0.0
    while conflicts:
        worst = max(conflicts, key=lambda key: (len(conflicts[key]), abs(ratio[key] - usual)))
        against = conflicts.pop(worst)
        others = len(against)
        slower = sum(cells[worst] > cells[other] for other in against) * 2 > others
        relation = "slower than" if slower else "faster than"
        kind = "that do more on no more of the device" if slower else "that do less on no less of the device"
        why[worst] = f"{relation} {others} cell{'s' if others > 1 else ''} {kind}"
        for other in against:
            conflicts[other].discard(worst)
            if not conflicts[other]:
                del conflicts[other]
    return why


def _against_neighbours(ratio: Mapping[Key, float]) -> dict[Key, str]:
    grid = _grid(ratio)
    gaps = {}
    for key in ratio:
        near = [ratio[other] for other in _neighbours(key, grid, ratio)]
        if len(near) >= _FEWEST_NEIGHBOURS:
            gaps[key] = ratio[key] - median(near)
    if not gaps:
        return {}
    spread = 1.4826 * median(abs(gap) for gap in gaps.values())
    limit = max(LEAST, LIMIT * spread)
    return {
        key: f"{math.exp(abs(gap)):.1f} times {'slower' if gap > 0 else 'faster'} than its neighbours suggest"
        for key, gap in gaps.items()
        if abs(gap) > limit
    }


def _grid(keys: Mapping[Key, float]) -> list[list[float]]:
    """The values of each axis, the share first, in order."""
    width = max((len(place) for _, place in keys), default=0)
    axes = [sorted({share for share, _ in keys})]
    axes += [sorted({float(place[i]) for _, place in keys}) for i in range(width)]
    return axes


def _neighbours(key: Key, grid: list[list[float]], known: Mapping[Key, float]) -> list[Key]:
    """The cells one step away along one axis, and those that have equally much to do: one step more along the first
    axis of the place and one less along the second, or the other way round."""
    point = [key[0], *map(float, key[1])]
    at = [values.index(value) for values, value in zip(grid, point, strict=True)]
    steps = [[step if axis == moved else 0 for axis in range(len(at))] for moved in range(len(at)) for step in (-1, 1)]
    if len(at) > 2:
        steps += [[0, step, -step, *[0] * (len(at) - 3)] for step in (-1, 1)]
    found = []
    for step in steps:
        moved = [i + by for i, by in zip(at, step, strict=True)]
        if all(0 <= i < len(values) for i, values in zip(moved, grid, strict=True)):
            other = [values[i] for i, values in zip(moved, grid, strict=True)]
            candidate = (other[0], tuple(int(value) for value in other[1:]))
            if candidate in known:
                found.append(candidate)
    return found
