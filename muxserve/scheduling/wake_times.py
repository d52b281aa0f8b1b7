"""How long waking a model takes beside other wakes and engines that run: they share a machine's cores, its caches and
the bandwidth of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# A wake alone takes what was declared, and twice as long when as much else runs as there are cores: so much do these
# two beliefs count, in wakes, and a wake counts so much less after each later one.
_BELIEF, _FORGETTING = 2.0, 0.97
# One wake counts as at most so many times faster or slower than was expected: it may have met something else.
_OUTLIER = 4.0
_MOST_SCALE, _MOST_DRAG = 16.0, 4.0


@dataclass(slots=True)
class WakePace:
    """Learns, from all wakes of a machine, `scale`: how much longer than declared a wake takes alone; and `drag`: by
    how much of that it takes longer for each other wake or busy model per core,

        seconds = declared * scale * (1 + drag * others / cores),

    by weighted least squares over ratios of measured to declared seconds.
    """

    cores: int = 1
    scale: float = 1.0
    drag: float = 1.0
    # Sums of weight, x, x^2, y and xy, where x = others / cores and y = seconds / declared.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def slowdown(self, others: float) -> float:
        """How many times as long as alone a wake takes beside so many."""
        return 1.0 + self.drag * max(0.0, others) / self.cores

    def learn(self, ratio: float, others: float) -> None:
        """A wake beside `others` on average took `ratio` times what was declared."""
        x, expected = others / self.cores, self.scale * self.slowdown(others)
        y = min(max(ratio, expected / _OUTLIER), expected * _OUTLIER)
        new = (1.0, x, x * x, y, x * y)
        self._sums = [_FORGETTING * old + each for old, each in zip(self._sums, new, strict=True)]
        # The beliefs are a wake at x = 0 with y = 1, and one at x = 1 with y = 2.
        belief = (2.0, 1.0, 1.0, 3.0, 2.0)
        n, sx, sxx, sy, sxy = (each + _BELIEF * b for each, b in zip(self._sums, belief, strict=True))
        slope = (n * sxy - sx * sy) / (n * sxx - sx * sx)
        self.scale = min(max((sy - slope * sx) / n, 1 / _MOST_SCALE), _MOST_SCALE)
        self.drag = min(max(slope / self.scale, 0.0), _MOST_DRAG)

    def ends(self, waking: Sequence[float], queued: Sequence[float], at_a_time: int, busy: int) -> list[float]:
        """In how many seconds each wake ends if at most `at_a_time` go on at once beside `busy` models that run: first
        those that are `waking`, then the `queued` in their order. Both are seconds that are left, or needed, alone."""
        ends = [0.0] * (len(waking) + len(queued))
        going = dict(enumerate(waking))
        later = list(enumerate(queued, len(waking)))[::-1]
        now = 0.0
        while going or later:
            while later and len(going) < at_a_time:
                index, seconds = later.pop()
                going[index] = seconds
            slowdown = self.slowdown(len(going) - 1 + busy)
            least = min(going.values())
            now += least * slowdown
            for index, left in list(going.items()):
                if left <= least:
                    ends[index] = now
                    del going[index]
                else:
                    going[index] = left - least
        return ends
