"""What the memory manager's client raises."""

from __future__ import annotations


class MemoryManagerError(Exception):
    """The memory manager refused a request and did nothing of it.

    `code` is one of MALFORMED, TOO_LARGE, WRONG_GENERATION, TOO_MANY_CLIENTS, UNKNOWN_MODEL, NOT_OWNER, KEY_EXISTS,
    UNKNOWN_KEY, QUOTA_EXCEEDS_POOL, MODEL_IN_USE, INVALID, EXHAUSTED, NO_MEMORY, FORBIDDEN, BAD_MAGIC, BAD_VERSION,
    NOT_GREETED, UNKNOWN_OPERATION.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class DeviceMemoryError(RuntimeError):
    """The CUDA driver refused; the message says which call, why, and what to do."""


class MemoryManagerGone(ConnectionError):  # noqa: N818 - a state of the world, like BrokenPipeError's relatives
    """The memory manager cannot be reached or has died: nothing is held any more, and nothing may be written."""
