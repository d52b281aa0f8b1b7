"""Which processes hang. Pure: it takes how often each process's main loop has come round, and the time, and answers
which are well again, which are suspect, and which hang and have to be killed.

What counts is *silence*: time in which the beats of a process have not risen while the watcher itself ran.

1. The watcher's own pauses do not count. Between two looks at most two of its periods are counted, so that a loaded
   machine makes nobody hang; after a longer pause (the machine slept, all clocks jumped) everybody begins anew.
2. Whoever waits for a process that is silent itself is not to blame: the cause is found first, and those that waited
   begin anew when it has spoken or is gone.
3. A process that computes, or would if it got a core, is most likely in a long step: its silence counts a sixth.
4. A silence counts as too long only if it is much longer than any before that ended by itself: an engine whose steps
   take seconds is given that time, and more, again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from muxserve.spec import WatchdogRules

Name = TypeVar("Name")

# A watcher that did not look for so many of its periods was stopped itself.
_PAUSE_PERIODS = 8
_COUNTED_PERIODS = 2
_COMPUTING_WEIGHT = 1 / 6
# Times the longest silence so far, and how far that may raise the limits: they stay limits.
_SUSPECT_FACTOR = 2.0
_HUNG_FACTOR = 3.0
_MOST = 6.0


class Liveness(Enum):
    """What is thought of a process."""

    WELL = "well"
    SUSPECT = "suspect"
    HUNG = "hung"


@dataclass(frozen=True)
class Sign:
    """What is seen of a process: how often its loop has come round, and whether it computes or waits for a core."""

    beats: int
    computing: bool = False


@dataclass(frozen=True)
class Finding(Generic[Name]):
    """`name` is now in `state`, after `silence` seconds."""

    name: Name
    state: Liveness
    silence: float


@dataclass
class _Silence(Generic[Name]):
    # Those that it may wait for.
    on: frozenset[Name]
    beats: int | None = None
    begun: bool = False
    silence: float = 0.0
    longest: float = 0.0
    state: Liveness = field(default=Liveness.WELL)


class Watchdog(Generic[Name]):
    """Watches processes by name.

    Args:
        rules: after how many seconds a silent process is suspect, and after how many it hangs.
        period: seconds between two looks.
    """

    def __init__(self, rules: WatchdogRules, period: float) -> None:
        self._rules = rules
        self._period = period
        self._watched: dict[Name, _Silence[Name]] = {}
        self._looked_at: float | None = None

    def watch(self, name: Name, on: Collection[Name] = (), begun: bool = True) -> None:
        """Watch `name` from now on, which may have to wait for those in `on`. Not `begun`: only from its first beat
        on."""
        self._watched[name] = _Silence(frozenset(on), begun=begun)

    def forget(self, name: Name) -> None:
        """It has ended."""
        self._watched.pop(name, None)
        for each in self._watched.values():
            if name in each.on:
                each.silence = 0.0

    def silence(self, name: Name) -> float:
        """Seconds of silence that count."""
        return self._watched[name].silence if name in self._watched else 0.0

    def look(self, now: float, signs: Mapping[Name, Sign]) -> list[Finding[Name]]:
        """Take in what is seen at `now` (monotonic seconds); who gives no sign at all is not judged. Returns whose
        state has changed."""
        passed = self._period if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if passed > _PAUSE_PERIODS * self._period:
            for each in self._watched.values():
                each.silence = 0.0
        passed = min(passed, _COUNTED_PERIODS * self._period)
        # First those that nobody else can be the cause for.
        order = sorted((name for name in self._watched if name in signs), key=lambda name: len(self._watched[name].on))
        findings = (self._judge(name, self._watched[name], signs[name], passed) for name in order)
        return [finding for finding in findings if finding is not None]

    def _judge(self, name: Name, seen: _Silence[Name], sign: Sign, passed: float) -> Finding[Name] | None:
        if seen.beats is None or sign.beats != seen.beats:
            seen.begun |= seen.beats is not None
            seen.beats = sign.beats
            seen.longest = max(seen.longest, seen.silence)
            seen.silence = 0.0
        elif not seen.begun or any(self._is_silent(other) for other in seen.on):
            seen.silence = 0.0
        else:
            seen.silence += passed * (_COMPUTING_WEIGHT if sign.computing else 1.0)
        return self._changed(name, seen)

    def _is_silent(self, name: Name) -> bool:
        """Well before it is suspect itself: those that wait for it fall silent at the same time."""
        return self.silence(name) > max(self._rules.suspect / 2, _COUNTED_PERIODS * self._period)

    def _changed(self, name: Name, seen: _Silence[Name]) -> Finding[Name] | None:
        if seen.state is Liveness.HUNG:
            return None  # it is being killed
        suspect, hung = self._limits(seen.longest)
        state = Liveness.HUNG if seen.silence > hung else Liveness.SUSPECT if seen.silence > suspect else Liveness.WELL
        if state is seen.state:
            return None
        seen.state = state
        return Finding(name, state, seen.silence)

    def _limits(self, longest: float) -> tuple[float, float]:
        rules = self._rules
        hung = max(rules.hung, min(_HUNG_FACTOR * longest, _MOST * rules.hung))
        return min(max(rules.suspect, _SUSPECT_FACTOR * longest), hung), hung
