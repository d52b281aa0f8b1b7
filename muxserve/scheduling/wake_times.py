"""How long waking a model takes beside other wakes and engines that run: they share a machine's cores, its caches and
the bandwidth of its memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from muxserve.scheduling.residency_types import Residence, Standing, WakeCosts

# A wake alone takes its declared seconds, and twice as long when as much else runs as there are cores: so much do
# these two beliefs count, in wakes, and a wake counts so much less after each later one.
_BELIEF, _FORGETTING = 2.0, 0.97
# One wake counts as at most so many times faster or slower than was expected: it may have met something else.
_OUTLIER = 4.0
_MOST_SCALE, _MOST_DRAG = 16.0, 4.0
# How much of a new duration counts against the one that was known before.
_SMOOTHING = 0.3
# A wake that takes longer than expected counts as ending in this time, seconds.
_ABOUT_TO_END = 0.02


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
        """How many times as long as alone a wake takes beside `others`."""
        return 1.0 + self.drag * max(0.0, others) / self.cores

    def learn(self, ratio: float, others: float) -> None:
        """A wake beside `others` on average took `ratio` times its declared seconds."""
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


@dataclass(slots=True)
class _Progress:
    """A wake under way, followed from `began` until `at`: the seconds alone that are `done`, and the integral over time
    of how many other wakes and busy models it had `beside` it."""

    began: float
    at: float
    done: float = 0.0
    beside: float = 0.0


@dataclass(slots=True)
class _Known:
    """`seconds`: how long waking the model takes alone, as learnt; None before its first wake."""

    costs: WakeCosts
    seconds: float | None = None
    progress: _Progress | None = None


class WakeTimes:
    """How long it takes to wake each model of one memory, and to put one to sleep; and how far the wakes under way have
    come.

    Args:
        sleep_seconds: until the memory of an idle model is free, until that was measured.
    """

    def __init__(self, sleep_seconds: float) -> None:
        self.pace = WakePace()
        self.sleep_seconds = sleep_seconds
        self._models: dict[str, _Known] = {}

    def change(self, cores: int, models: Mapping[str, WakeCosts]) -> None:
        """Other models; the durations of models whose costs are the same are kept."""
        self.pace.cores = cores
        self._models = {
            name: known if (known := self._models.get(name)) is not None and known.costs == costs else _Known(costs)
            for name, costs in models.items()
        }

    def seconds(self, model: str) -> float:
        """Expected time to wake the model with nothing beside it. Before its first wake: its declared time, scaled as
        the wakes of others took longer or shorter than declared."""
        known = self._models[model]
        return self.pace.scale * known.costs.seconds if known.seconds is None else known.seconds

    def woke(self, model: str, seconds: float) -> None:
        """The wake of the model has taken so long."""
        known = self._models[model]
        followed, known.progress = known.progress, None
        beside = 0.0
        if followed is not None and followed.at > followed.began:
            beside = followed.beside / (followed.at - followed.began)
        before = self.seconds(model)
        if known.costs.seconds > 0:
            self.pace.learn(seconds / known.costs.seconds, beside)
        known.seconds = before + _SMOOTHING * (seconds / self.pace.slowdown(beside) - before)

    def slept(self, seconds: float) -> None:
        """The memory of an idle model was free so long after the model was put to sleep."""
        self.sleep_seconds += _SMOOTHING * (seconds - self.sleep_seconds)

    def follow(self, now: float, standings: Collection[Standing]) -> None:
        """Record how far the wakes under way have come since the last call, and beside how much else."""
        busy = busy_models(standings)
        waking = [each for each in standings if each.residence is Residence.WAKING]
        for each in waking:
            known = self._models[each.model]
            if known.progress is None:
                known.progress = _Progress(each.since, each.since)
            gone, others = max(0.0, now - known.progress.at), len(waking) - 1 + busy
            known.progress.at = max(now, known.progress.at)
            known.progress.done += gone / self.pace.slowdown(others)
            known.progress.beside += gone * others
        for each in standings:
            if each.residence is Residence.ASLEEP:
                self._models[each.model].progress = None  # its wake has failed

    def left(self, model: str) -> float:
        """Seconds alone that the wake of the model still takes."""
        progress = self._models[model].progress
        return max(_ABOUT_TO_END, self.seconds(model) - (0.0 if progress is None else progress.done))


def busy_models(standings: Iterable[Standing]) -> int:
    """How many models have running requests."""
    return sum(each.running > 0 for each in standings)
