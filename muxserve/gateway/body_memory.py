"""How much memory the bodies of requests may take together before the requests are admitted.

Each is bounded in size, and each model in how many it lets wait; but clients are not bounded in number, and what they
send is in memory before anybody knows which model it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MEMORY_BYTES = 256 << 20
# Bodies up to this size have a part of it to themselves, so that large ones cannot keep everybody out.
SMALL_BYTES = 64 << 10
FOR_SMALL = 0.25


class BodyMemory:
    """What the bodies of requests take that are not admitted yet: those that are still coming and those that wait.

    Args:
        largest: bytes of the largest body taken. There is room for 16 of them, or `MEMORY_BYTES` if that is more.
    """

    def __init__(self, largest: int) -> None:
        self.most = max(MEMORY_BYTES, 16 * largest)
        self.used = 0

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """One request's part, which ends with the block at the latest."""
        claim = Claim(self)
        try:
            yield claim
        finally:
            claim.release()


class Claim:
    """Bytes of one body."""

    __slots__ = ("_memory", "size")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.size = 0

    def grow(self, size: int) -> bool:
        """The body has `size` bytes by now; whether there is room for them. If there is not, it counts no more."""
        memory = self._memory
        most = memory.most if size <= SMALL_BYTES else memory.most * (1.0 - FOR_SMALL)
        used = memory.used + size - self.size
        if used > most:
            self.release()
            return False
        memory.used, self.size = used, size
        return True

    def release(self) -> None:
        """The body counts no more."""
        self._memory.used -= self.size
        self.size = 0
