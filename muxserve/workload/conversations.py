"""Conversations: each turn's prompt is all that was said before, behind a system prompt that conversations share."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from muxserve.workload.arrivals import Arrivals
from muxserve.workload.lengths import Lengths
from muxserve.workload.trace import TraceRequest

# Conversations that began this many mean lengths before the start may still go on then.
_BEFORE = 4.0
_SAMPLES = 200


@dataclass(frozen=True)
class Conversations:
    """How long conversations are and what they share.

    The number of turns is geometric with mean `turns`. The next turn comes when the answer has been read, at
    `token_seconds` for each of its tokens, and after a pause, exponential with mean `think` seconds: the generator does
    not know when the answer is there, so it comes all the same where serving takes longer than that. A conversation
    begins with one of `systems` system prompts, of `system` tokens each. When its prompt would be longer than `longest`
    tokens another one begins in its place.

    Raises:
        ValueError: a value that makes no sense.
    """

    turns: float = 4.0
    think: float = 20.0
    system: int = 500
    systems: int = 4
    longest: int | None = None
    token_seconds: float = 0.05

    def __post_init__(self) -> None:
        if not (self.turns >= 1 and math.isfinite(self.turns)):
            raise ValueError(f"turns must be at least 1, not {self.turns:g}")
        if not (self.think >= 0 and math.isfinite(self.think)):
            raise ValueError(f"think must be zero or positive seconds, not {self.think:g}")
        if self.system < 0 or self.systems < 1:
            raise ValueError("system must be at least 0 tokens, and systems at least 1")
        if self.longest is not None and self.longest <= self.system:
            raise ValueError(f"prompts of at most {self.longest} tokens have no room behind a system prompt as long")

    def requests(
        self, model: str, rate: float, prompt: Lengths, output: Lengths, duration: float, seed: int
    ) -> Iterator[TraceRequest]:
        """Turns below `duration` seconds in order of arrival, `rate` per second on average. Conversations are under way
        at the start. `prompt` and `output` are the lengths of what is said in a turn."""
        draw = random.Random(f"{seed}/{model}/lengths")
        answers = sum(output.sample(draw) for _ in range(_SAMPLES)) / _SAMPLES
        before = _BEFORE * self.turns * (self.think + answers * self.token_seconds)
        starts = Arrivals().times(rate / self.turns, before + duration, random.Random(f"{seed}/{model}/arrivals"))
        turns: list[_Turn] = []
        for number, start in enumerate(starts):
            while turns and turns[0].when <= start - before:
                yield from self._take(turns, model, prompt, output)
            rng = random.Random(f"{seed}/{model}/{number}")
            more = int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / self.turns)) if self.turns > 1 else 0
            system = f"{model}/system {rng.randrange(self.systems)}"
            heapq.heappush(turns, _Turn(start - before, number, 0, system, rng, 0, more))
        while turns and turns[0].when < duration:
            yield from self._take(turns, model, prompt, output)

    def _take(self, turns: list[_Turn], model: str, prompt: Lengths, output: Lengths) -> Iterator[TraceRequest]:
        """The next turn of all; the one after it takes its place."""
        turn = heapq.heappop(turns)
        rng, number, asked = turn.rng, turn.number, prompt.sample(turn.rng)
        said = turn.said + asked
        if self.longest is not None and self.system + said > self.longest:
            number, said = number + 1, min(asked, self.longest - self.system)
        answer = output.sample(rng)
        if turn.when >= 0.0:
            shared = ((turn.system, self.system),) if self.system else ()
            content = (*shared, (f"{model}/{turn.conversation}.{number}", said))
            yield TraceRequest(round(turn.when, 6), model, self.system + said, answer, content)
        if turn.more:
            pause = rng.expovariate(1.0 / self.think) if self.think else 0.0
            when = turn.when + answer * self.token_seconds + pause
            following = _Turn(when, turn.conversation, number, turn.system, rng, said + answer, turn.more - 1)
            heapq.heappush(turns, following)


class _Turn(NamedTuple):
    """The `number`-th conversation in its place: `said` tokens were said before it, `more` turns follow."""

    when: float
    conversation: int
    number: int
    system: str
    rng: random.Random
    said: int
    more: int
