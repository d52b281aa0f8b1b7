"""Requests through the official client, each of which is judged: right, refused as documented, or lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import httpx2  # what the official client is made of
import openai

from tests.e2e.fleet import Fleet
from tests.e2e.load import stream_chat
from tests.e2e.reference import requests_for
from tests.support.patience import PATIENCE

# How requests end. All but those in `FAULTS` are as promised:
RIGHT = "right"  # stock vLLM's answer, or one that cannot be compared and is complete
REFUSED = "refused"  # 429 with `Retry-After`, or 503, in OpenAI's shape
REJECTED = "rejected"  # another 4xx in OpenAI's shape, of a request that deserves it
CANCELLED = "cancelled"  # the client went away
BROKEN = "broken"  # its gateway was killed, or stopped
UNREACHED = "unreached"  # no gateway listened: it was never accepted
FAILED = "failed"  # 500 in OpenAI's shape, of a request that makes its own step throw
WRONG = "wrong"  # another answer than stock vLLM's
LOST = "lost"  # no answer, no end, or an error that it did not deserve
UNSHAPED = "unshaped"  # an error that is not in OpenAI's shape
OUTCOMES = (RIGHT, REFUSED, REJECTED, CANCELLED, BROKEN, UNREACHED, FAILED, WRONG, LOST, UNSHAPED)
FAULTS = (WRONG, LOST, UNSHAPED)

_SHOWN = 400
# For a request to end: a process that hangs while it seems to compute is given a minute.
ENDS_SECONDS = 2 * PATIENCE


@dataclass
class Tally:
    """How many requests ended how, and the faults among them in words."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    longest_seconds: float = 0.0

    def add(self, outcome: str, words: str = "", seconds: float = 0.0) -> None:
        self.counts[outcome] += 1
        self.longest_seconds = max(self.longest_seconds, seconds)
        if outcome in FAULTS:
            self.faults.append(f"{outcome}: {words}"[:_SHOWN])

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[outcome]} {outcome}" for outcome in OUTCOMES if self.counts[outcome]) or "none"


def judge_status(status: int, text: str, headers: Mapping[str, str]) -> tuple[str, str]:
    """What an answer means that is not 200, and in words."""
    words = f"{status}: {text[:_SHOWN]}"
    try:
        error = json.loads(text)["error"]
        shaped = isinstance(error["message"], str) and error["message"] and error["type"] and error["code"] == status
    except (ValueError, TypeError, LookupError):
        shaped = False
    if not shaped:
        return UNSHAPED, words
    if status == 429 and not headers.get("retry-after", "").isdecimal():
        return UNSHAPED, f"no Retry-After: {words}"
    if status in (429, 503):
        return REFUSED, words
    return (REJECTED if 400 <= status < 500 else FAILED), words


def judge_error(error: BaseException) -> tuple[str, str]:
    """What an error that the client raised means, and in words.

    `REJECTED` and `FAILED` are for the caller to judge: whether the request deserved it.
    """
    if isinstance(error, openai.APIStatusError):
        return judge_status(error.status_code, error.response.text, error.response.headers)
    if isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
        # An error that came in the middle of a stream.
        return FAILED, f"in the stream: {error.message} {error.body}"
    if isinstance(error, TimeoutError | openai.APITimeoutError):
        return LOST, f"no end in time ({type(error).__name__})"
    cause = f" from {error.__cause__!r}" if error.__cause__ else ""
    return LOST, f"{error!r}{cause}"


async def judged(
    tally: Tally,
    work: Callable[[], Awaitable[tuple[str, str]]],
    *,
    what: str,
    seconds: float = ENDS_SECONDS,
    deserves: Sequence[str] = (),
    may_break: Callable[[], bool] = lambda: False,
) -> str:
    """Do `work`, which says how it ended, within `seconds`, and add that to the tally.

    Args:
        what: the request in words.
        deserves: of `REJECTED` and `FAILED`, what the request may be answered with.
        may_break: whether its connection may break now.
    """
    began = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            outcome, words = await work()
    except (openai.APIError, httpx.HTTPError, httpx2.HTTPError, OSError) as error:
        outcome, words = judge_error(error)
        broke = isinstance(error, openai.APIConnectionError | httpx.TransportError | httpx2.TransportError | OSError)
        if outcome == LOST and broke and not isinstance(error, TimeoutError) and may_break():
            cause = error.__cause__ or error
            outcome = UNREACHED if isinstance(cause, httpx.ConnectError | httpx2.ConnectError) else BROKEN
    if outcome in (REJECTED, FAILED) and outcome not in deserves:
        outcome = LOST
    tally.add(outcome, f"{what} after {time.monotonic() - began:.1f} s: {words}", time.monotonic() - began)
    return outcome


async def whole_chat(client: openai.AsyncOpenAI, model: str, request: dict[str, Any]) -> dict[str, Any]:
    """One answer in one piece, in the form of `stream_chat`."""
    answer = await client.chat.completions.create(model=model, **request)
    assert answer.usage is not None
    return {
        "text": answer.choices[0].message.content or "",
        "finish": answer.choices[0].finish_reason,
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": answer.usage.completion_tokens,
    }


class Questions:
    """Requests whose answers are known, of the models of one fleet."""

    def __init__(self, models: Sequence[str], reference: dict[str, list[dict[str, Any]]]) -> None:
        self.models = models
        self.reference = reference
        self._requests = {model: requests_for(model) for model in models}

    def any(self, rng: random.Random, model: str | None = None) -> tuple[str, int]:
        model = model or rng.choice(list(self.models))
        return model, rng.randrange(len(self._requests[model]))

    def request(self, model: str, index: int) -> dict[str, Any]:
        return self._requests[model][index]

    def judge(self, model: str, index: int, answer: dict[str, Any]) -> tuple[str, str]:
        expected = self.reference[model][index]
        return (RIGHT, "") if answer == expected else (WRONG, f"{answer} instead of {expected}")

    async def ask(self, client: openai.AsyncOpenAI, model: str, index: int, stream: bool) -> tuple[str, str]:
        """One answer, judged."""
        chat = stream_chat if stream else whole_chat
        return self.judge(model, index, await chat(client, model, self.request(model, index)))


class Background:
    """Load without end by some clients, which ask, wait a little, and ask again.

    `tally` may be exchanged for another between two steps. `breakable` is set while gateways may break streams.
    """

    def __init__(
        self, fleet: Fleet, questions: Questions, rng: random.Random, clients: int = 10, pause_seconds: float = 0.5
    ) -> None:
        self.tally = Tally()
        self.breakable = False
        self.in_flight = 0
        self._fleet = fleet
        self._questions = questions
        self._rng = rng
        self._clients = clients
        self._pause = pause_seconds
        self._flowing = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Background:
        self._client = self._fleet.async_client()
        self._tasks = [
            asyncio.create_task(self._go_on(random.Random(self._rng.random()))) for _ in range(self._clients)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            await self._client.close()

    def resume(self) -> None:
        """Ask again."""
        self._flowing.set()

    async def quiesce(self) -> None:
        """Ask nothing more, and wait until all has ended."""
        self._flowing.clear()
        await self._idle.wait()

    async def until_busy(self, answered: int = 4, in_flight: int = 4) -> None:
        """Until answers come and requests are open, for `PATIENCE` at most."""
        begun = self.tally.counts.total()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while self.tally.counts.total() - begun < answered or self.in_flight < in_flight:
                    await asyncio.sleep(0.05)

    async def _go_on(self, rng: random.Random) -> None:
        while True:
            await self._flowing.wait()
            model, index = self._questions.any(rng)
            stream = rng.random() < 0.7
            tally = self.tally
            self.in_flight += 1
            self._idle.clear()
            try:
                await judged(
                    tally,
                    lambda model=model, index=index, stream=stream: self._questions.ask(
                        self._client, model, index, stream
                    ),
                    what=f"{model}[{index}]{' streamed' if stream else ''}",
                    may_break=lambda: self.breakable,
                )
            finally:
                self.in_flight -= 1
                if not self.in_flight:
                    self._idle.set()
            await asyncio.sleep(rng.expovariate(1 / self._pause))
