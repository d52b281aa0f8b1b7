"""What every loop does with messages that cannot be: it says so once, drops them and goes on.

A frame that is no message, a message that contradicts what is known (`ImpossibleMessageError`), and one over which its
handler stumbles: none of them ends a process that serves others, and none fills its log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

M = TypeVar("M")

# After a line about one kind of message no other is logged for so many seconds.
QUIET_SECONDS = 10.0


class ImpossibleMessageError(Exception):
    """A message that its sender cannot mean: of a lease that was never given, of somebody else's request. The text says
    why; nothing was done."""


class Inbox(Generic[M]):
    """Reads one process's messages. `dropped` counts by kind those that were dropped.

    Args:
        log: of the process.
        decode: what makes a message of a frame; raises `msgspec.DecodeError`.
        clock: seconds.
    """

    def __init__(
        self, log: logging.Logger, decode: Callable[[bytes], M], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._log = log
        self._decode = decode
        self._clock = clock
        self._quiet_until: dict[str, float] = {}
        self._told: Counter[str] = Counter()

    def read(self, frame: bytes, peer: object) -> M | None:
        """The message of a frame from `peer`; None if it is none of ours."""
        try:
            return self._decode(frame)
        except msgspec.DecodeError as error:
            self.drop("frame", f"a message from {_shown(peer)} that is none of ours ignored: {error}")
            return None

    def handle(self, message: object, peer: object, handler: Callable[..., object], *arguments: object) -> None:
        """Call `handler` with `arguments`; whatever it raises, the next message is handled all the same."""
        try:
            handler(*arguments)
        except ImpossibleMessageError as error:
            kind = type(message).__name__
            self.drop(kind, f"an impossible {kind} from {_shown(peer)} ignored: {error}")
        except Exception:
            # The message made sense to nobody who wrote this; the other requests go on.
            kind = type(message).__name__
            self.drop(f"failed {kind}", f"a {kind} from {_shown(peer)} could not be handled", traceback=True)

    def drop(self, kind: str, text: str, traceback: bool = False) -> None:
        """Count a message that is dropped, and log `text` unless there was one of its `kind` just before."""
        self.dropped[kind] += 1
        now = self._clock()
        if now < self._quiet_until.get(kind, 0.0):
            return
        self._quiet_until[kind] = now + QUIET_SECONDS
        more = self.dropped[kind] - self._told[kind] - 1
        self._told[kind] = self.dropped[kind]
        unsaid = f" ({more} more of this kind since it was last said)" if more else ""
        self._log.warning("%s%s", text, unsaid, exc_info=traceback)


def _shown(peer: object) -> str:
    return peer.decode(errors="backslashreplace") if isinstance(peer, bytes) else str(peer)
