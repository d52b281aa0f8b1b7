"""Prompts of a given length that share no prefix: token ids where a server takes them, else words."""

from __future__ import annotations

import random
from typing import TypeVar

_T = TypeVar("_T")

# Common words that most tokenizers know as one token with the space before them.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name team minute idea kid body back parent face"
)
_WORDS = _TEXT.split()
_POOL = 1 << 15
_MARK = 4


class Prompts:
    """Prompts from a seed. Each begins with its number, so that no prefix cache makes one cheaper than the workload
    says; the rest is cut from a pool, which costs the client next to nothing.

    Args:
        seed: of the pool.
        low, high: ids to use, both included. The default are bytes or short pieces in every common vocabulary.
    """

    def __init__(self, seed: int, low: int = 10, high: int = 400) -> None:
        if not 0 <= low < high:
            raise ValueError(f"token ids need 0 <= low < high, not {low} and {high}")
        rng = random.Random(f"{seed}/prompts")
        self._low, self._span = low, high - low + 1
        self._ids = [rng.randint(low, high) for _ in range(_POOL)]
        self._words = [rng.choice(_WORDS) for _ in range(_POOL)]
        self._starts = [rng.randrange(_POOL) for _ in range(1009)]

    def ids(self, number: int, tokens: int) -> list[int]:
        """Exactly `tokens` ids for the `number`-th request."""
        mark, rest = [], number
        for _ in range(min(_MARK, tokens)):
            rest, digit = divmod(rest, self._span)
            mark.append(self._low + digit)
        return mark + self._cut(self._ids, number, tokens - len(mark))

    def text(self, number: int, words: int) -> str:
        """`words` words, the first of which tells the requests apart."""
        if words <= 1:
            return str(number)
        return " ".join([str(number), *self._cut(self._words, number, words - 1)])

    def _cut(self, pool: list[_T], number: int, count: int) -> list[_T]:
        start = self._starts[number % len(self._starts)]
        piece = pool[start : start + count]
        while len(piece) < count:
            piece += pool[: count - len(piece)]
        return piece
