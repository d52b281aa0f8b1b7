"""Events with names. The ends of engines' steps are the clock's own (`clock`), since nearly all events are of that
kind; everything else that happens at a time is a `TimedEvent`, declared beside what it happens to."""

from __future__ import annotations


class TimedEvent:
    """Something that happens at a time."""

    __slots__ = ()

    def handle(self, now: float) -> None:
        """It happens."""
        raise NotImplementedError
