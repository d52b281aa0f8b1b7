"""When there should be a replica more or less: by the part of recent requests that met their objectives."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RollingScalingRules:
    """More replicas when less than `target` of the requests of the last `window` seconds met their objectives (once
    there are `enough` of them), or when more than `backlog` requests per replica wait for one: a part `growth` of those
    there are, at least one. One less when at least `target` did (of few, all) and replicas spent less than `idle` of
    their time prefilling. Between two changes there are `patience` seconds, and always `least` to `most` replicas.

    EcoServe (section 3.5) scales up when attainment falls below what is asked for. That is known late, after an
    objective's time; the backlog, the size of the step and scaling down are this project's.
    """

    target: float = 0.9
    window: float = 10.0
    patience: float = 5.0
    idle: float = 0.0
    least: int = 1
    most: int = 64
    enough: int = 10
    backlog: float = 1.0
    growth: float = 0.125

    def __post_init__(self) -> None:
        if not (0 < self.target <= 1 and self.window > 0 and self.patience >= 0 and 0 <= self.idle <= 1):
            raise ValueError("target must be in (0, 1], window above zero, patience not negative, idle in [0, 1]")
        if not 1 <= self.least <= self.most or self.enough < 1 or self.backlog < 0 or self.growth < 0:
            raise ValueError("give 1 <= least <= most, enough >= 1, and neither backlog nor growth below zero")


class Attainment:
    """Tells how many replicas there should be more (above zero) or less (below)."""

    def __init__(self, rules: RollingScalingRules) -> None:
        self.rules = rules
        self._seen: deque[tuple[float, bool]] = deque()
        self._met = 0
        self._changed = float("-inf")

    def add(self, met: bool, now: float) -> None:
        """A request has met its objectives, or can meet them no more."""
        self._seen.append((now, met))
        self._met += met

    def share(self, now: float) -> float | None:
        """The part within the window that has met them; None while there are too few to tell."""
        seen = self._seen
        while seen and seen[0][0] < now - self.rules.window:
            self._met -= seen.popleft()[1]
        return self._met / len(seen) if len(seen) >= self.rules.enough else None

    def wanted(self, replicas: int, busy: float, now: float, waiting: int = 0) -> int:
        """The answer, which counts as carried out.

        Args:
            replicas: those that are there and those that come.
            busy: part of their time that replicas spent prefilling since the last call.
            waiting: requests that no replica has got yet.
        """
        rules, share = self.rules, self.share(now)
        if now - self._changed < rules.patience:
            return 0
        missed = share is not None and share < rules.target
        if missed or waiting > rules.backlog * replicas:
            step = min(max(1, round(rules.growth * replicas)), rules.most - replicas)
        elif (share is not None or self._met == len(self._seen)) and busy < rules.idle and replicas > rules.least:
            step = -1
        else:
            step = 0
        if step:
            self._changed = now
        return step
