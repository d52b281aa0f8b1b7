"""How long answers are expected to be, by those that have ended."""

from __future__ import annotations

import math

# After this many more answers an answer counts e times less.
_MEMORY = 512
# The weight of the first expectation, in answers.
_PRIOR = 8


class AnswerLengths:
    """Tokens that are kept free for an answer whose length nobody knows: the mean of the latest ones.

    A replica with room for the mean of each nearly always has room for all together; one that has not preempts.

    The mean is taken as the generated tokens over the answers that have ended. The lengths of those that have
    ended would be too short for long after a start, since short answers end first.

    Args:
        first: tokens expected before any answer has ended, at least 1.
    """

    __slots__ = ("_ended", "_tokens", "expected")

    def __init__(self, first: int) -> None:
        self._ended = float(_PRIOR)
        self._tokens = float(_PRIOR * first)
        self.expected = first

    def add(self, decoded: int, ended: int) -> None:
        """Decode steps have generated `decoded` tokens, and `ended` answers have ended, for whatever reason."""
        kept = (1.0 - 1.0 / _MEMORY) ** ended
        # The first token of an answer comes from its prompt.
        self._tokens = kept * self._tokens + decoded + ended
        self._ended = kept * self._ended + ended
        self.expected = max(1, math.ceil(self._tokens / self._ended))
