"""When a followed fleet file is applied: after its change, and again while something beside it is in the way. Pure."""

from __future__ import annotations

from enum import Enum

# After a failure the next try comes so many seconds later, each time twice as many.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0


class ApplyOutcome(Enum):
    """What came of applying a fleet file."""

    # The fleet is as the file says, but for what needs a start.
    DONE = "done"
    # The file has a mistake. It has to be changed.
    WRONG = "wrong"
    # Something beside the file was in the way: a checkpoint that is not there, no room. It may be gone the next time.
    FAILED = "failed"


class FileTries:
    """The tries to apply one file. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._failures = 0

    def changed(self, now: float) -> None:
        """The file has changed: it is tried at once, and what was before does not count."""
        self._due, self._failures = now, 0

    def forget(self) -> None:
        """Somebody else has seen to what was in the way: no try is left."""
        self._due = None

    def begin(self, now: float) -> bool:
        """Whether to try now; then `ended` is to follow."""
        if self._due is None or now < self._due:
            return False
        self._due = None
        return True

    def ended(self, followed: ApplyOutcome, now: float) -> float | None:
        """A try has come to that; the seconds until the next one, None: there is none before the file changes."""
        if followed is not ApplyOutcome.FAILED:
            return None
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures, 30))
        self._failures += 1
        self._due = now + pause
        return pause
