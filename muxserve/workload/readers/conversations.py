"""From a conversation to requests: which of its turns are prompts, which are answers, and how long they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from muxserve.workload.readers.format import ReadOptions


class Turn(NamedTuple):
    """A message. `tokens` is None where the file does not count them."""

    answer: bool
    text: str
    tokens: int | None = None


def pairs(turns: Sequence[Turn], options: ReadOptions) -> Iterator[tuple[int, int]]:
    """Tokens of prompt and answer of each request in a conversation.

    The first answer that has a prompt, or with `all_turns` every one: its prompt is then all that was said before it,
    as a chat server sees it (what a chat template adds is not counted).
    """
    before = 0
    for turn in turns:
        tokens = options.count(turn.text) if turn.tokens is None else turn.tokens
        if turn.answer and before:
            yield before, tokens
            if not options.all_turns:
                return
        before += tokens
