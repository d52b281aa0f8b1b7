"""Residency: which models are awake, decided by demand under a limit of memory (weights and KV in one balance).

Pure: told of requests, of what was measured and of the time, it answers which models to wake and which to put to
sleep. A model sleeps only because another one needs its memory, or is about to: memory for the next wakes is kept free
where that is worth more than what the cheapest idle model is there for. Requests for sleeping models wait, grouped by
model, so that one wake serves all of them; groups whose deadlines can still be met go first, hopeless ones last, and
whoever has waited for `max_wait` before all others. While a model waits for memory, its weights are prefetched into
what is free of that by now. Where what sleeps is in files, models get there while there is nothing else to do: a model
that was never awake is woken, and one that has not slept yet sleeps for a moment.

Whatever is measured, nobody waits for ever. A model for which there would be no room if all others slept is woken
beyond the limit when it has waited for `max_wait` and nobody else is awake, or its requests are refused where that is
more than there can be (`ceiling`). The last model that is awake serves on while it has requests, although the limit is
exceeded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from muxserve.scheduling.deadlines import TimedJob, moore_hodgson
from muxserve.scheduling.wake_times import WakePace

# How much of a new wake's duration counts against what was known before.
_SMOOTHING = 0.3
# Models that count as never asked for are put to sleep in the order of their bytes all the same.
_LEAST_RATE = 1e-6
# Of those that wait so many are looked at to say how many to wake at a time.
_LOOKED_AT = 12
# A wake that takes longer than was expected is counted on to end so soon, seconds.
_ABOUT_TO_END = 0.02
# A model that could not get into its file tries again after so long, then after twice that and so on, seconds.
_RETRY, _RETRY_MOST = 10.0, 600.0
# What was measured of a model is believed from so many measurements on, and counts for so many residences after it.
_BELIEVED, _REMEMBERED = 2, 3


@dataclass(frozen=True, slots=True)
class ResidencyRules:
    """Everything together takes at most `limit` bytes. What is no model counts as `fixed` bytes until it was measured,
    and then as what was measured and `fixed_margin`.

    A model stays awake for `min_residence` seconds and for `residence_factor` times what waking it takes, so that
    waking takes a bounded part of the time. A request that has waited for `max_wait` seconds goes before all that have
    not, and nobody takes memory that it needs. A model with running requests is put to sleep only when another has
    waited for `patience` seconds. Rates of arrivals are averages over each of the `windows`, seconds; the largest
    counts. At most `wakes` models are woken at a time, on a machine of so many `cores`; fewer if that serves more
    requests in time. Putting an idle model to sleep takes `sleep_seconds` until that was measured. `wakes_ahead`: a
    model that has been awake is woken faster, and all models are to have been that. `files_ahead`: also, one that has
    slept, as its memory is in a file then.

    `ceiling`, bytes: a model that never has room below `limit` is woken beyond it, up to this; None: without end. With
    the limit itself, as of a GPU's memory, nothing is woken beyond it.

    Raises:
        ValueError: a number that makes no sense.
    """

    limit: int
    min_residence: float = 2.0
    residence_factor: float = 4.0
    max_wait: float = 10.0
    patience: float = 0.5
    windows: tuple[float, ...] = (5.0, 60.0, 600.0)
    wakes: int = 1
    cores: int = 1
    sleep_seconds: float = 0.0
    fixed: int = 0
    fixed_margin: int = 0
    wakes_ahead: bool = False
    files_ahead: bool = False
    ceiling: int | None = None

    def __post_init__(self) -> None:
        if min(self.limit, self.wakes, self.cores) < 1 or not self.windows or min(self.windows) <= 0:
            raise ValueError("limit, wakes, cores and windows must be positive")
        if min(self.min_residence, self.residence_factor, self.max_wait, self.patience, self.sleep_seconds) < 0:
            raise ValueError("times must not be negative")


@dataclass(frozen=True, slots=True)
class WakeCosts:
    """What a model takes, as expected before it was awake for the first time: bytes while it is awake, `load_bytes`
    more while it is being woken, seconds to wake it; and its objectives for the first token and for the time between
    tokens, seconds. From one measurement to the next it takes at most `margin` bytes more. `pinned`: it never
    sleeps."""

    bytes: int
    load_bytes: int = 0
    seconds: float = 1.0
    ttft: float = 5.0
    pinned: bool = False
    margin: int = 0
    tpot: float = 0.1


class Residence(Enum):
    """Where a model is: `leaving` finishes what runs, and sleeps then."""

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Standing:
    """How a model stands: where it is and since when; its running requests; when those that wait for it arrived; the
    bytes that were measured of it (0: not measured), its KV cache included, or of a sleeping one those that prefetched
    weights take; and the bytes per second by which that grows."""

    model: str
    residence: Residence
    since: float
    running: int = 0
    waiting: Sequence[float] = ()
    held: int = 0
    growth: float = 0.0


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake the model. `beyond`: the bytes by which the limit will be exceeded, since it never has room below it."""

    model: str
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class Sleep:
    """Let the model finish what runs and sleep; `reason` for the user. `ahead`: nobody waits for its memory yet."""

    model: str
    reason: str
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Stay:
    """The model, which was told to sleep, is needed more than others by now."""

    model: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The sleeping model is woken when there is memory for it; by then its weights are to be at hand. They may take so
    many bytes of the memory already, and no longer what they took of it beyond that."""

    model: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The model cannot be woken, since `missing` bytes would be missing if all others slept: answer its requests."""

    model: str
    missing: int


Change = Wake | Sleep | Stay | Prefetch | Refuse


@dataclass(slots=True)
class ArrivalRates:
    """Requests per second, averaged over windows (seconds) of exponential memory."""

    windows: Sequence[float]
    _counts: list[float] = field(default_factory=list)
    _at: float = -math.inf

    @property
    def never(self) -> bool:
        """Whether no request has ever come."""
        return not self._counts

    def add(self, now: float) -> None:
        """A request has come."""
        self._counts = [count + 1.0 for count in self._aged(now)]
        self._at = now

    def averages(self, now: float) -> list[float]:
        """The average over each of the windows."""
        return [count / window for count, window in zip(self._aged(now), self.windows, strict=True)]

    def most(self, now: float) -> float:
        """The largest of the averages: a burst counts at once, and what comes rarely is not forgotten at once."""
        return max(self.averages(now))

    def _aged(self, now: float) -> list[float]:
        if not self._counts:
            return [0.0] * len(self.windows)
        gone = max(0.0, now - self._at)
        return [count * math.exp(-gone / window) for count, window in zip(self._counts, self.windows, strict=True)]


# What requests for a model wait for, by where it is.
_WHILE = {
    Residence.ASLEEP: "its wake",
    Residence.WAKING: "its wake, which has begun",
    Residence.AWAKE: "its engines, which are being started again",
    Residence.LEAVING: "its next wake: it finishes what runs and sleeps first",
}


def _busy(standings: Iterable[Standing]) -> int:
    """Models that run something."""
    return sum(each.running > 0 for each in standings)


@dataclass(slots=True)
class _Progress:
    """A wake that goes on: until when it was followed, the seconds alone that are `done`, and the integral over time of
    how many other wakes and busy models it had beside it."""

    began: float
    at: float
    done: float = 0.0
    beside: float = 0.0


@dataclass(slots=True)
class _Known:
    """What is known of a model: as declared, then as measured. `seconds` are what waking it takes alone. `peak` is the
    most of this residence, of which there are so many `measurements`, `peaks` those of the residences before it;
    `wake_peaks` what its last wakes took at most while they loaded it, and with `woken` the last one is not among
    them. `begun`: it has been told to wake; `filed`: and to sleep, with time for its memory to move into a file;
    `back`: and to wake again for that. It was `refused` so often, and is not to try again before `retry`."""

    costs: WakeCosts
    rates: ArrivalRates
    seconds: float | None = None
    progress: _Progress | None = None
    begun: bool = False
    filed: bool = False
    back: bool = False
    refused: int = 0
    retry: float = -math.inf
    woken: bool = True
    wake_peaks: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    peak: int = 0
    measurements: int = 0
    peaks: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def learned(self) -> int | None:
        """The most that was measured lately, with the margin; None if that is not believed yet."""
        if self.measurements < _BELIEVED and not self.peaks:
            return None
        most = max(self.peak, *self.peaks, 0)
        return max(most, min(self.costs.bytes, most + self.costs.margin))

    @property
    def learned_wake(self) -> int | None:
        """The most that its last wakes took, with the margin; None if that is not known."""
        declared = self.costs.bytes + self.costs.load_bytes
        return min(declared, max(self.wake_peaks) + self.costs.margin) if self.wake_peaks else None


@dataclass(slots=True)
class _Balance:
    """Bytes that are `free`, and those `promised` by models that are leaving. What is reserved for somebody is in
    neither."""

    free: int
    promised: int

    def reserve(self, need: int) -> None:
        """Set aside what somebody waits for."""
        left = self.free + self.promised - need
        self.free = max(0, self.free - need)
        self.promised = max(0, left - self.free)


class Residency:
    """Decides for the models of one memory.

    Args:
        models: what each takes, by name.
    """

    def __init__(self, rules: ResidencyRules, models: dict[str, WakeCosts]) -> None:
        self.rules = rules
        self.pace = WakePace(rules.cores)
        self.sleep_seconds = rules.sleep_seconds
        # Time alone may change what the last decision was: somebody waits, or memory ahead is missing.
        self.restless = False
        # A model is to be woken for its file when there is nothing else to do, or there is room.
        self.preparing = False
        # By model that requests wait for, what it waits for itself, in words, as of the last decision.
        self.waits_for: dict[str, str] = {}
        # Bytes beyond the limit that models take and may come to take, and nobody is about to give back, as of then.
        self.excess = 0
        # By model that is to be prefetched, the bytes that it was told last.
        self._prefetching: dict[str, int] = {}
        self._known: dict[str, _Known] = {}
        self.change(rules, models)

    def change(self, rules: ResidencyRules, models: dict[str, WakeCosts]) -> None:
        """Other rules or models; what was measured of those that stay is kept."""
        self.rules, self.preparing = rules, rules.wakes_ahead or rules.files_ahead
        self.pace.cores = rules.cores
        self._known = {
            name: known
            if (known := self._known.get(name)) is not None and known.costs == costs
            else _Known(costs, ArrivalRates(rules.windows))
            for name, costs in models.items()
        }
        self._expect()

    # ------------------------------------------------------------ what is learned

    def arrived(self, model: str, now: float) -> None:
        """A request for the model has come, whether it is awake or not."""
        self._known[model].rates.add(now)

    def woke(self, model: str, seconds: float) -> None:
        """Waking it has taken so long."""
        known = self._known[model]
        followed = known.progress
        beside = 0.0
        if followed is not None and followed.at > followed.began:
            beside = followed.beside / (followed.at - followed.began)
        known.progress, known.woken = None, True
        before = self.wake_seconds(model)
        if known.costs.seconds > 0:
            self.pace.learn(seconds / known.costs.seconds, beside)
        known.seconds = before + _SMOOTHING * (seconds / self.pace.slowdown(beside) - before)
        if known.measurements >= _BELIEVED:
            known.peaks.append(known.peak)
            known.peak = known.measurements = 0

    def slept(self, seconds: float) -> None:
        """From when a model was told to sleep, while it had no requests, its memory was free after so long."""
        self.sleep_seconds += _SMOOTHING * (seconds - self.sleep_seconds)

    def unfiled(self, model: str, now: float) -> None:
        """It was put to sleep with time to move its memory into a file, which was not done: the disk is behind, or the
        file system full. Says nothing where models get into no files."""
        if not self.rules.files_ahead:
            return
        known = self._known[model]
        known.filed = known.back = False
        known.retry = now + min(_RETRY * 2**known.refused, _RETRY_MOST)
        known.refused += 1
        self.preparing = True

    def measured(self, model: str, held: int, wake_peak: int = 0) -> None:
        """It takes so many bytes while it is awake, and took so many at most while it was woken (0: not known)."""
        known = self._known[model]
        known.measurements += 1
        known.peak = max(known.peak, held)
        if wake_peak and known.woken:
            known.woken = False
            known.wake_peaks.append(wake_peak)
        self._expect()

    def expected(self, model: str) -> int:
        """Bytes that the model may come to take while it is awake, before it is measured again: the most that was
        measured in its last residences, with its margin. Before that is known, what was declared, less what was
        declared too much of all models that are at least as large and known: processes of a smaller one take no more
        besides its weights."""
        return self._expected[model]

    def needs(self, model: str) -> int:
        """Bytes that have to be free to wake the model: what it took at most in its last wakes, and what it may come to
        take when it is awake. Before that is known, as `expected`."""
        return self._needs[model]

    def wake_seconds(self, model: str) -> float:
        """Expected time to wake it with nothing beside: of a model that was never woken what was declared, times what
        the wakes of others took of theirs."""
        known = self._known[model]
        return self.pace.scale * known.costs.seconds if known.seconds is None else known.seconds

    def rate(self, model: str, now: float) -> float:
        """Requests per second, the largest average."""
        return self._known[model].rates.most(now)

    def absence_cost(self, model: str, now: float) -> float:
        """Of a sleeping model: the seconds that its requests wait for it per second, weighed by how much of their
        objective that is."""
        rate, seconds = max(_LEAST_RATE, self.rate(model, now)), self.wake_seconds(model)
        return rate * seconds * (seconds / self._known[model].costs.ttft)

    # ------------------------------------------------------------ decisions

    def decide(self, now: float, fixed: int | None, standings: Iterable[Standing]) -> list[Change]:
        """What changes at `now`.

        Args:
            fixed: bytes that are not of models, as measured; None: as declared.
            standings: of all models.

        First, models are put to sleep if more is taken than there is. Then the groups of waiting requests, in the
        order of `queue`: (1) if there is room, the model is woken; (2) if those that are leaving make room, it waits
        for them; (3) otherwise those whose absence costs least are told to sleep; (4) if that is not enough, it waits,
        and from `max_wait` on so does everybody behind it. (5) If there would not be room for it then although all
        others slept, they are told to sleep, and it is woken beyond the limit, or refused. The first that wait are
        prefetched. Then, models that are leaving although requests wait for them stay if their memory is promised to
        nobody. Last, memory for the next wakes is kept free, and if nothing of all this changes anything, a model gets
        into its file.
        """
        by_name = {each.model: each for each in standings}
        self._follow(now, by_name.values())
        self.restless = any(each.waiting and each.residence is not Residence.AWAKE for each in by_name.values())
        self.waits_for = {each.model: _WHILE[each.residence] for each in by_name.values() if each.waiting}
        balance = self._balance(self._fixed(fixed), by_name.values())
        changes: list[Change] = []
        if balance.free + balance.promised < 0:
            changes += self._shrink(now, balance, by_name)
        self.excess = max(0, -balance.free - balance.promised)
        told = {change.model for change in changes}
        spare = balance.free
        wakes = sum(each.residence is Residence.WAKING for each in by_name.values())
        queue = self.queue(now, by_name.values())
        at_a_time = self.at_a_time(now, queue, by_name)
        for model in queue:
            need, waited = self.needs(model), now - min(by_name[model].waiting)
            if need <= balance.free:
                balance.free -= need
                if wakes < at_a_time:
                    wakes += 1
                    spare -= need
                    changes.append(self._wake(model))
                    self.waits_for[model] = _WHILE[Residence.WAKING]
                else:
                    self.waits_for[model] = "the wakes of other models"
                continue
            missing = need - balance.free - balance.promised
            if missing > 0:
                awake = [each for each in by_name.values() if each.model not in told]
                victims = self._victims(now, missing, awake, busy=waited >= self.rules.patience)
                if victims is None:
                    self.waits_for[model] = f"{missing} bytes of memory, until others may sleep"
                    if waited < self.rules.max_wait:
                        continue
                    beyond = self._beyond(now, model, self._fixed(fixed), by_name.values(), told)
                    changes += beyond
                    if any(isinstance(change, Refuse) for change in beyond):
                        continue
                    # What comes free is for this one.
                    behind = queue[queue.index(model) + 1 :]
                    self.waits_for |= dict.fromkeys(behind, f"memory that {model} gets first, which has waited longer")
                    return self._prefetch(queue, spare, by_name, changes) + changes
                for victim in victims:
                    told.add(victim.model)
                    balance.promised += self._taken(victim)
                    changes.append(Sleep(victim.model, f"memory for {model}"))
            self.waits_for[model] = "the memory of a model that is about to sleep"
            balance.reserve(need)
        for each in sorted((e for e in by_name.values() if e.waiting), key=lambda e: min(e.waiting)):
            if each.residence is Residence.LEAVING and balance.promised >= self._taken(each):
                balance.promised -= self._taken(each)
                changes.append(Stay(each.model))
                told.add(each.model)
        changes += self._room_ahead(now, balance, by_name, told)
        if (self.rules.wakes_ahead or self.rules.files_ahead) and not changes:
            changes = self._prepare(now, balance.free, by_name.values())
        for change in changes:
            if isinstance(change, Sleep) and change.ahead:
                self._known[change.model].filed = True
        return self._prefetch(queue, spare, by_name, changes) + changes

    def queue(self, now: float, standings: Iterable[Standing]) -> list[str]:
        """The sleeping models that requests wait for, in the order in which they are to be woken."""
        starved, hopeless = [], []
        jobs: list[TimedJob] = []
        standings = list(standings)
        busy, waking = _busy(standings), sum(each.residence is Residence.WAKING for each in standings)
        alone = self.pace.slowdown(waking + busy)
        # As on one machine that is so many times as fast.
        together = self.pace.slowdown(self.rules.wakes - 1 + busy) / self.rules.wakes
        for each in standings:
            if not each.waiting or each.residence is not Residence.ASLEEP:
                continue
            oldest = min(each.waiting)
            seconds = self.wake_seconds(each.model)
            possible = [deadline for deadline in self._deadlines(each) if now + seconds * alone <= deadline]
            if now - oldest >= self.rules.max_wait:
                starved.append((oldest, each.model))
            elif possible:
                jobs.append(TimedJob(each.model, seconds * together, min(possible), len(possible)))
            else:
                hopeless.append((oldest, each.model))
        in_time, late = moore_hodgson(jobs, now)
        last = [job.name for job in late] + [model for _, model in sorted(hopeless)]
        return [model for _, model in sorted(starved)] + [job.name for job in in_time] + last

    def at_a_time(self, now: float, queue: Sequence[str], standings: Mapping[str, Standing]) -> int:
        """How many models to wake at once, those that are being woken included: with so many the most of those that
        wait are served in time, and of several such numbers that with which they wait least together."""
        if self.rules.wakes == 1 or not queue:
            return self.rules.wakes
        going = [each for each in standings.values() if each.residence is Residence.WAKING]
        left = [self._left(each.model) for each in going]
        first = [standings[model] for model in queue[:_LOOKED_AT]]
        seconds = [self.wake_seconds(each.model) for each in first]
        busy = _busy(standings.values())

        def served(count: int) -> tuple[int, float]:
            ends = [now + end for end in self.pace.ends(left, seconds, count, busy)]
            groups = list(zip(ends, [*going, *first], strict=True))
            in_time = sum(end <= deadline for end, each in groups for deadline in self._deadlines(each))
            return in_time, -sum(end * len(each.waiting) for end, each in groups)

        return max(range(1, self.rules.wakes + 1), key=served)

    # ------------------------------------------------------------ inside

    def _beyond(
        self, now: float, model: str, fixed: int, standings: Iterable[Standing], told: Collection[str]
    ) -> list[Change]:
        """What is done for `model`, which has waited for long and for which those that may sleep now make no room:
        nothing if all others together would, in a while."""
        standings = list(standings)
        others = [each for each in standings if each.model != model and not self._known[each.model].costs.pinned]
        pinned = [each for each in standings if self._known[each.model].costs.pinned]
        missing = self.needs(model) - self._balance(fixed, pinned).free
        if missing <= 0:
            return []
        ceiling = self.rules.ceiling
        if ceiling is not None and missing > ceiling - self.rules.limit:
            self.waits_for[model] = f"{missing} bytes of memory that are missing although all others sleep"
            return [Refuse(model, missing)]
        self.waits_for[model] = f"its turn beyond the limit: {missing} bytes are missing although all others sleep"
        awake = [each for each in others if each.residence is Residence.AWAKE and each.model not in told]
        if all(each.residence is Residence.ASLEEP for each in others):
            return [self._wake(model, missing)]
        if len(awake) < sum(each.residence is not Residence.ASLEEP for each in others):
            return []  # some are being woken, or about to sleep
        if not all(self._may_leave(each, now) for each in awake):
            return []
        return [Sleep(each.model, f"memory for {model}, which exceeds the limit by itself") for each in awake]

    def _prefetch(
        self, queue: Iterable[str], spare: int, standings: Mapping[str, Standing], changes: Iterable[Change]
    ) -> list[Change]:
        """What is prefetched from now on, to be carried out before `changes`: of those that wait as many models as may
        be woken at a time, into the `spare` bytes that nothing takes; and of others nothing any more. What prefetched
        weights take counts as free elsewhere: if another model needs it, nothing is lost but time."""
        woken = {change.model for change in changes if isinstance(change, Wake)}
        allowed: dict[str, int] = {}
        for model in [name for name in queue if name not in woken][: self.rules.wakes]:
            allowed[model] = min(self.needs(model), max(0, spare))
            spare -= allowed[model]
        asleep = [each for each in standings.values() if each.residence is Residence.ASLEEP]
        given_back = {each.model: 0 for each in asleep if each.held and each.model not in {*allowed, *woken}}
        told, self._prefetching = self._prefetching, allowed
        changed = {name: most for name, most in {**given_back, **allowed}.items() if told.get(name) != most}
        return [Prefetch(name, most) for name, most in changed.items()]

    def _deadlines(self, standing: Standing) -> list[float]:
        ttft = self._known[standing.model].costs.ttft
        return [arrival + ttft for arrival in standing.waiting]

    def _follow(self, now: float, standings: Collection[Standing]) -> None:
        """How far wakes have come since the last decision, and beside how much else."""
        busy = _busy(standings)
        waking = [each for each in standings if each.residence is Residence.WAKING]
        for each in waking:
            known = self._known[each.model]
            if known.progress is None:
                known.progress = _Progress(each.since, each.since)
            gone, others = max(0.0, now - known.progress.at), len(waking) - 1 + busy
            known.progress.at = max(now, known.progress.at)
            known.progress.done += gone / self.pace.slowdown(others)
            known.progress.beside += gone * others
        for each in standings:
            if each.residence is Residence.ASLEEP:
                self._known[each.model].progress = None  # its wake has failed

    def _left(self, model: str) -> float:
        """Seconds alone that the wake of a model still takes; one that takes longer than expected is about to end."""
        progress = self._known[model].progress
        return max(_ABOUT_TO_END, self.wake_seconds(model) - (0.0 if progress is None else progress.done))

    def _room_ahead(
        self, now: float, balance: _Balance, standings: Mapping[str, Standing], told: Collection[str]
    ) -> list[Change]:
        """Puts idle models to sleep so that the next wake finds memory free, and perhaps the one after it.

        With s seconds to put a model to sleep, whoever asks for a sleeping model waits w + s in place of w; that costs,
        as in `absence_cost`, rate * ((w + s)^2 - w^2) / TTFT objective, summed over all sleeping models. It is
        compared with the cost of the absence of those that would sleep. The room for a second wake counts as often as
        another request comes within those s seconds, and so on (arrivals as of a Poisson process).
        """
        asleep = [e.model for e in standings.values() if e.residence is Residence.ASLEEP and not e.waiting]
        asleep.sort(key=lambda model: (-self.rate(model, now), model))
        s = self.sleep_seconds
        rates = [0.0] * len(self.rules.windows)
        gains = list(rates)
        for model in asleep:
            w, ttft = self.wake_seconds(model), self._known[model].costs.ttft
            for index, rate in enumerate(self._known[model].rates.averages(now)):
                rates[index] += rate
                gains[index] += rate * (2 * w + s) * s / ttft
        changes: list[Change] = []
        need, likely = 0, 1.0
        for number, model in enumerate(asleep[: self.rules.wakes]):
            need += self.needs(model)
            missing = need - balance.free - balance.promised
            if missing > 0:
                awake = [each for each in standings.values() if each.model not in told]
                victims = self._victims(now, missing, awake, busy=False)
                costs = sum(self.absence_cost(each.model, now) for each in victims or ())
                if victims is None or costs >= likely * max(gains):
                    self.restless = True
                    break
                for victim in victims:
                    told = {*told, victim.model}
                    balance.promised += self._taken(victim)
                    changes.append(Sleep(victim.model, "memory for the next wake", ahead=True))
            # That more than so many come while one model is put to sleep.
            likely -= math.exp(-max(rates) * s) * (max(rates) * s) ** number / math.factorial(number)
        return changes

    def _prepare(self, now: float, free: int, standings: Collection[Standing]) -> list[Change]:
        """If nobody waits, nothing runs, and no model comes or goes: (1) a model that was never awake is woken; models
        that nobody has ever asked for sleep for that. Where models get into files: (2) when there is none, one of these
        that has not slept yet does, and (3) is woken again, once. A model that could not get into its file is woken for
        another try. Room for another wake stays free."""
        asleep = [each.model for each in standings if each.residence is Residence.ASLEEP]
        refused = {
            name for name, known in self._known.items() if known.refused and not known.filed and known.rates.never
        }
        again = {name for name in refused if now >= self._known[name].retry}
        never = [name for name in asleep if not (self._known[name].begun or self._known[name].filed)]
        model = min(never, default=min(again.intersection(asleep), default=None))
        unasked = [
            each
            for each in standings
            if each.residence is Residence.AWAKE
            and self._known[each.model].rates.never
            and not self._known[each.model].costs.pinned
        ]
        filing = unasked if self.rules.files_ahead else ()
        unfiled = [e for e in filing if not self._known[e.model].filed and e.model not in refused - again]
        self.preparing = model is not None or bool(unfiled or refused)
        settled = all(each.residence in (Residence.AWAKE, Residence.ASLEEP) for each in standings)
        if not settled or any(each.running or each.waiting for each in standings):
            return []

        def missing_for(model: str) -> int:
            return self.needs(model) + max((self.needs(name) for name in asleep if name != model), default=0) - free

        if model is None:
            for each in unfiled:
                if self._may_leave(each, now):
                    return [Sleep(each.model, "it is to be in a file", ahead=True)]
            for name in asleep:
                known = self._known[name]
                if known.filed and not known.back and known.rates.never and missing_for(name) <= 0:
                    known.back = True
                    return [self._wake(name)]
            return []
        missing = missing_for(model)
        if missing <= 0:
            return [self._wake(model)]
        victims = self._cheapest(now, missing, [each for each in unasked if self._may_leave(each, now)])
        if victims is None:
            # Some have not been awake for long.
            self.preparing = bool(refused) or self._cheapest(now, missing, unasked) is not None
            return []
        return [Sleep(each.model, f"{model} is to be in a file, too", ahead=True) for each in victims]

    def _wake(self, model: str, beyond: int = 0) -> Wake:
        self._known[model].begun = True
        return Wake(model, beyond)

    def _expect(self) -> None:
        def estimated(known: _Known, declared: int, spared: Iterable[tuple[int, int]]) -> int:
            """Of a model of which it is not known: what was declared, less what those that are as large spared."""
            least = min((spare for size, spare in spared if size >= known.costs.bytes), default=0)
            return declared - max(0, least)

        every = self._known.values()
        spared, spared_waking = [], []
        for each in every:
            costs = each.costs
            if (learned := each.learned) is not None:
                spared.append((costs.bytes, costs.bytes - learned))
            if (learned := each.learned_wake) is not None:
                spared_waking.append((costs.bytes, costs.bytes + costs.load_bytes - learned))
        self._expected, self._needs = {}, {}
        for name, each in self._known.items():
            if (expected := each.learned) is None:
                expected = max(estimated(each, each.costs.bytes, spared), each.peak)
            if (woken := each.learned_wake) is None:
                woken = estimated(each, each.costs.bytes + each.costs.load_bytes, spared_waking)
                if not spared_waking:  # nobody has seen a wake's peak: it is that much above what stays
                    woken = expected + each.costs.load_bytes
            self._expected[name], self._needs[name] = expected, max(expected, woken)

    def _fixed(self, measured: int | None) -> int:
        return self.rules.fixed if measured is None else measured + self.rules.fixed_margin

    def _balance(self, fixed: int, standings: Iterable[Standing]) -> _Balance:
        free, promised = self.rules.limit - fixed, 0
        for each in standings:
            taken = self._taken(each)
            free -= taken
            if each.residence is Residence.LEAVING:
                promised += taken
            # What grows until the next wake has ended is not given away.
            free -= math.ceil(max(0.0, each.growth) * self.wake_seconds(each.model))
        return _Balance(free, promised)

    def _taken(self, standing: Standing) -> int:
        """Bytes that count for a model: those that it may come to take, since between two measurements nobody looks."""
        if standing.residence is Residence.ASLEEP:
            return 0
        if standing.residence is Residence.WAKING:
            return max(standing.held, self.needs(standing.model))
        return max(standing.held, self._expected[standing.model])

    def _victims(self, now: float, missing: int, standings: Iterable[Standing], busy: bool) -> list[Standing] | None:
        """Who is to sleep so that `missing` bytes come free; None: they cannot. `busy`: whether those with running
        requests may be among them."""
        return self._cheapest(
            now, missing, [each for each in standings if self._may_leave(each, now) and (busy or not each.running)]
        )

    def _may_leave(self, standing: Standing, now: float) -> bool:
        if standing.residence is not Residence.AWAKE or self._known[standing.model].costs.pinned:
            return False
        return now - standing.since >= max(
            self.rules.min_residence,
            self.rules.residence_factor * min(self.wake_seconds(standing.model), self.rules.max_wait),
        )

    def _cheapest(self, now: float, missing: int, candidates: Iterable[Standing]) -> list[Standing] | None:
        """Of the candidates those whose absence costs least per byte and that are idle come first; whoever turns out
        not to be needed for `missing` bytes stays."""

        chosen: list[Standing] = []
        freed = 0
        in_order = sorted(candidates, key=lambda each: self._worth(each, now))
        for each in in_order:
            if freed >= missing:
                break
            chosen.append(each)
            freed += self._taken(each)
        if freed < missing:
            return None
        for each in chosen[::-1]:
            if freed - self._taken(each) >= missing:
                chosen.remove(each)
                freed -= self._taken(each)
        return chosen

    def _worth(self, each: Standing, now: float) -> tuple[bool, float, str]:
        """By what models are put to sleep: idle ones first, then those whose absence costs least per byte."""
        return bool(each.running), self.absence_cost(each.model, now) / max(1, self._taken(each)), each.model

    def _shrink(self, now: float, balance: _Balance, standings: dict[str, Standing]) -> list[Change]:
        """More is taken than there is: put to sleep what costs least, however lately it was woken. The last that would
        be awake stays while it serves, and for its residence: if all slept, nobody would be served."""
        awake = [
            each
            for each in standings.values()
            if each.residence is Residence.AWAKE and not self._known[each.model].costs.pinned
        ]
        missing = -(balance.free + balance.promised)
        victims = self._cheapest(now, missing, awake)
        if victims is None:
            victims = sorted(awake, key=lambda each: self._worth(each, now))
        waking = any(each.residence is Residence.WAKING for each in standings.values())
        if victims and len(victims) == len(awake) and not waking:
            last = victims[-1]
            if last.running or last.waiting or not self._may_leave(last, now):
                victims = victims[:-1]
        balance.promised += sum(self._taken(each) for each in victims)
        return [Sleep(each.model, "more memory is taken than there is") for each in victims]
