"""How many instances a model has: its average freeness is kept within bounds (Llumnix, section 4.4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muxserve.replicas.decisions import Drain, Resume, Start, StopInstance
from muxserve.replicas.views import InstanceLoad


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Instances between `minimum` and `maximum`; the average freeness between `low` and `high` tokens per request.

    Outside for `hold` seconds on end one instance more is started, or one is drained; another `hold` seconds have to
    pass before the next change. A model may have a `minimum` of 0: its last instance is drained after `idle_seconds`
    without a request, and the next request wakes it, waiting for at most `wake_limit` seconds.

    The bounds are 10 and 60 blocks of 16 tokens, those of Llumnix's release (`--scale-up-threshold`,
    `--scale-down-threshold`), whose check runs every 10 s.

    Raises:
        ValueError: bounds that contradict each other, or times that are negative.
    """

    minimum: int = 1
    maximum: int = 1
    low: float = 160.0
    high: float = 960.0
    hold: float = 10.0
    idle_seconds: float = 300.0
    wake_limit: float = 120.0

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum or self.maximum < 1:
            raise ValueError(
                f"instances need 0 <= minimum <= maximum and maximum >= 1, not {self.minimum} and {self.maximum}"
            )
        if not self.low < self.high:
            raise ValueError(f"freeness needs low < high, not {self.low:g} and {self.high:g}")
        if self.hold < 0 or self.idle_seconds < 0 or self.wake_limit <= 0:
            raise ValueError("hold and idle_seconds must be zero or positive seconds, wake_limit above zero")


class Scaler:
    """Decides for one model."""

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self._low_since: float | None = None
        self._high_since: float | None = None
        self._idle_since: float | None = None

    def decide(
        self, now: float, loads: Sequence[InstanceLoad], starting: int, waiting: int
    ) -> list[Start | Drain | Resume | StopInstance]:
        """What changes at `now` (seconds), given all scored instances that are up, how many are starting, and how many
        requests wait for an instance.

        A draining instance that has nothing left is stopped. When more are needed, a draining one stays rather than
        that another is started.
        """
        rules = self.rules
        serving = [load for load in loads if not load.terminating]
        draining = [load for load in loads if load.terminating]
        changes: list[Start | Drain | Resume | StopInstance] = [
            StopInstance(load.name) for load in draining if load.idle
        ]
        draining = [load for load in draining if not load.idle]
        missing = max(rules.minimum, 1 if waiting else 0) - len(serving) - starting
        if missing > 0:
            self._forget()
            return changes + _more(draining, missing)
        average = math.fsum(load.freeness for load in serving) / len(serving) if serving else math.inf
        if self._last_is_idle(now, serving, starting, waiting):
            self._forget()
            return [*changes, *(Drain(load.name) for load in serving)]
        self._low_since = _since(self._low_since, now, bool(serving) and average < rules.low)
        self._high_since = _since(self._high_since, now, average > rules.high)
        if self._low_since is not None and now - self._low_since >= rules.hold:
            if len(serving) + starting < rules.maximum:
                self._forget()
                return changes + _more(draining, 1)
            return changes
        # The last one goes only when it has been idle, and none while another has yet to take its part of the load.
        spare = len(serving) > max(rules.minimum, 1) and not starting
        if spare and self._high_since is not None and now - self._high_since >= rules.hold:
            self._forget()
            changes.append(Drain(min(serving, key=lambda load: (load.running + load.waiting, load.name)).name))
        return changes

    def _last_is_idle(self, now: float, serving: Sequence[InstanceLoad], starting: int, waiting: int) -> bool:
        """The only instance left has had no request for long enough."""
        last = self.rules.minimum == 0 and len(serving) == 1 and not starting and not waiting and serving[0].idle
        self._idle_since = _since(self._idle_since, now, last)
        return self._idle_since is not None and now - self._idle_since >= self.rules.idle_seconds

    def _forget(self) -> None:
        self._low_since = self._high_since = self._idle_since = None


def _since(since: float | None, now: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now if since is None else since


def _more(draining: Sequence[InstanceLoad], count: int) -> list[Start | Drain | Resume | StopInstance]:
    """`count` instances more; of the draining ones first those that have most to do still."""
    back = sorted(draining, key=lambda load: (-load.running, load.name))[:count]
    changes: list[Start | Drain | Resume | StopInstance] = [Resume(load.name) for load in back]
    if count > len(back):
        changes.append(Start(count - len(back)))
    return changes
