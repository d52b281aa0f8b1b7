"""How long tests wait for what has to happen: an event that comes ends the wait, so that a long one costs nothing.

A machine that does other things meanwhile may take many times as long as a quiet one. A test that waits says what it
waits for, so that one that fails needs no second look at the clock.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator

PATIENCE = 120.0
"""Seconds for one thing that a process does at once when it gets the time to."""


def pauses(first: float = 0.002, longest: float = 0.1) -> Iterator[float]:
    """Seconds between looks at something: what comes soon is seen soon, and looking costs little of what it waits
    for."""
    while True:
        yield first
        first = min(first * 1.5, longest)


def eventually(condition: Callable[[], bool], what: str | Callable[[], str], seconds: float = PATIENCE) -> None:
    """Look again and again, for something that another process does without telling.

    Raises:
        AssertionError: `what` did not happen in time.
    """
    end, pause = time.monotonic() + seconds, pauses()
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(next(pause))


def until_ended(pid: int, what: str, seconds: float = PATIENCE) -> None:
    """Wait for the end of any process, a child of ours or not. One that nobody has collected yet has ended.

    Raises:
        AssertionError: it lives on.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        over, _, _ = select.select([process], [], [], seconds)
    finally:
        os.close(process)
    assert over, f"{what}: process {pid} still runs after {seconds:g} s"
