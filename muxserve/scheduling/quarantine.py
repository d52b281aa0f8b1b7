"""Which request makes engines fail, and what is done about it.

An engine that fails takes all requests of its batch along, and nobody can tell which of them was the cause. So it is
counted for each of them, and who was there too often is a *suspect*: its engine computes it alone, one suspect after
the other, while all others sit still. One that fails alone is the culprit, and ends with an error. One that computes
alone for some steps is cleared, and counted anew.

A crash is what an engine did itself (an exception, SIGSEGV, SIGABRT, a hang); a kill came from outside. Anybody may be
in the batch when an engine is killed, so that kills weigh less, and those before a token that has come since do not
count at all: whoever gets on is not what kills.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import msgspec

from muxserve.wire import Cause, Failures

# Crashes, or failures of either kind, at which a suspect was in the batch.
SUSPECT_CRASHES = 2
SUSPECT_FAILURES = 3
# A request that was computed alone is the culprit after one crash, or this many kills.
CULPRIT_KILLS = 3
# A suspect is cleared when it has decoded alone for so many steps; twice as many each time it was cleared before.
PROBATION_STEPS = 16
LONGEST_PROBATION_STEPS = 256
# However far it has come, it keeps others waiting for at most so long.
ALONE_SECONDS = 10.0


def failed(before: Failures, cause: Cause, among: int) -> Failures:
    """The record of a request after an engine failed with a batch of `among` requests, this one included."""
    # Until there is reason to suspect it, whoever was alone may just have been the only one.
    alone = int(among == 1 and is_suspect(before))
    if cause is Cause.CRASH:
        return msgspec.structs.replace(before, crashes=before.crashes + 1, crashes_alone=before.crashes_alone + alone)
    if cause is Cause.KILL:
        return msgspec.structs.replace(before, kills=before.kills + 1, kills_alone=before.kills_alone + alone)
    return before


def submitted(before: Failures, tokens: int) -> Failures:
    """The record of a request that is submitted with so many output tokens."""
    if tokens <= before.tokens:
        return before
    return msgspec.structs.replace(before, kills=0, kills_alone=0, tokens=tokens)


def is_known(record: Failures) -> bool:
    """There is something to remember."""
    return record != _NOTHING


def is_suspect(record: Failures) -> bool:
    """It is to be computed alone."""
    return record.crashes >= SUSPECT_CRASHES or record.crashes + record.kills >= SUSPECT_FAILURES


def is_culprit(record: Failures) -> bool:
    """It is what makes engines fail."""
    return record.crashes_alone > 0 or record.kills_alone >= CULPRIT_KILLS


class LoneRequest(NamedTuple):
    """The request that is computed alone next, for at most so many steps."""

    request_id: str
    steps: int


class _Suspect:
    """`steps` that it still has to decode alone; `since`: when it was first computed alone."""

    __slots__ = ("since", "steps")

    def __init__(self, record: Failures) -> None:
        self.steps = min(PROBATION_STEPS << min(record.cleared, 16), LONGEST_PROBATION_STEPS)
        self.since: float | None = None


class Quarantine:
    """The requests of one unit that engines failed with, and which of them are computed alone."""

    def __init__(self) -> None:
        self._records: dict[str, Failures] = {}
        self._suspects: dict[str, _Suspect] = {}

    def __bool__(self) -> bool:
        """There are suspects."""
        return bool(self._suspects)

    def record(self, request_id: str) -> Failures:
        """What is known of a request."""
        return self._records.get(request_id, _NOTHING)

    def came(self, request_id: str, record: Failures, tokens: int) -> None:
        """A request was submitted with that record and so many output tokens."""
        record = submitted(record, tokens)
        if record == _NOTHING:
            return
        self._records[request_id] = record
        if is_suspect(record):
            self._suspects[request_id] = _Suspect(record)

    def left(self, request_id: str) -> None:
        """A request is no longer here."""
        self._suspects.pop(request_id, None)
        self._records.pop(request_id, None)

    def failed(self, batch: list[str], cause: Cause) -> None:
        """An engine failed while it computed these requests."""
        if cause is not Cause.NONE:
            for request_id in batch:
                self._records[request_id] = failed(self.record(request_id), cause, len(batch))

    def alone(self, there: Container[str], now: float) -> LoneRequest | None:
        """Who of those `there`, in one engine, is to be computed alone next; None: all together."""
        for request_id, suspect in list(self._suspects.items()):
            if request_id not in there:
                continue
            if suspect.since is None:
                suspect.since = now
            elif now - suspect.since >= ALONE_SECONDS:
                self._clear(request_id)
                continue
            return LoneRequest(request_id, suspect.steps)
        return None

    def decoded(self, request_id: str, steps: int) -> None:
        """A suspect has decoded alone for so many steps."""
        suspect = self._suspects.get(request_id)
        if suspect is not None:
            suspect.steps -= steps
            if suspect.steps <= 0:
                self._clear(request_id)

    def _clear(self, request_id: str) -> None:
        record = self.record(request_id)
        del self._suspects[request_id]
        self._records[request_id] = Failures(cleared=record.cleared + 1, tokens=record.tokens)


_NOTHING = Failures()
