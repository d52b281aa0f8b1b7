"""Concurrent streamed chats against a fleet, compared with stock vLLM's answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import openai

from tests.e2e.fleet import Fleet
from tests.e2e.reference import MODELS, requests_for
from tests.support.patience import PATIENCE, pauses

Answer = dict[str, Any]


def greedy(question: str, tokens: int) -> dict[str, Any]:
    """A chat whose answer has so many tokens, the same ones every time."""
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}


async def stream_chat(client: openai.AsyncOpenAI, model: str, request: dict[str, Any]) -> Answer:
    """One streamed answer: its text, finish reason and usage as the client saw them."""
    text, finish, usage = "", None, None
    stream = await client.chat.completions.create(
        model=model, stream=True, stream_options={"include_usage": True}, **request
    )
    async for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert usage is not None
    return {
        "text": text,
        "finish": finish,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


async def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Until `condition`, asked in a thread of its own, holds.

    Raises:
        AssertionError: it does not in time.
    """
    end, pause = asyncio.get_running_loop().time() + seconds, pauses(0.02)
    while not await asyncio.to_thread(condition):
        assert asyncio.get_running_loop().time() < end, f"not {what} within {seconds:.0f} s"
        await asyncio.sleep(next(pause))


class Load:
    """Streamed chats without end, `concurrency` at a time: `async with Load(...) as load`. At the end of the block no
    more are begun than are missing to have asked each once, and those that were begun are waited for. So whatever is
    done in the block is done while streams are open, however long it takes.

    `open` counts the requests that have no answer yet. Afterwards `answers` are the last ones by model and index, and
    `wrong` those that were not stock vLLM's.

    Args:
        fleet: what is asked.
        reference: stock vLLM's answers by model, in the order of `requests_for`.
        models: that are asked, in turns.
        per_model: how many requests of each there are; None: all.
        each: whether each of them is asked.
    """

    def __init__(
        self,
        fleet: Fleet,
        reference: Mapping[str, Sequence[Answer]],
        models: Sequence[str] = MODELS,
        per_model: int | None = None,
        concurrency: int = 32,
        each: bool = True,
    ) -> None:
        self.answers: dict[tuple[str, int], Answer] = {}
        self.wrong: dict[str, tuple[Answer, Answer]] = {}
        requests = {model: requests_for(model)[:per_model] for model in models}
        count = len(requests[models[0]])
        self.models = models
        self._fleet, self._reference, self._requests = fleet, reference, requests
        self._missing = count * len(models) if each else 0
        self._next = itertools.cycle([(model, index) for index in range(count) for model in models])
        self._concurrency = concurrency
        self._enough = False
        self.open = 0

    def enough(self) -> None:
        """Begin no more than are missing."""
        self._enough = True

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Like the function, but a request that fails is told at once."""
        waiting = asyncio.create_task(until(condition, what, seconds))
        try:
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                await self._task
            await waiting
        finally:
            waiting.cancel()

    async def _ask(self, client: openai.AsyncOpenAI) -> None:
        while self._missing > 0 or not self._enough:
            model, index = next(self._next)
            self._missing -= 1
            self.open += 1
            try:
                answer = await stream_chat(client, model, self._requests[model][index])
            except openai.APITimeoutError as error:
                error.add_note(await asyncio.to_thread(self._fleet.account))
                raise
            self.open -= 1
            self.answers[model, index] = answer
            if answer != self._reference[model][index]:
                self.wrong[f"{model}[{index}]"] = (answer, self._reference[model][index])

    async def _ask_all(self) -> None:
        async with self._fleet.async_client() as client, asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(self._ask(client))

    async def __aenter__(self) -> Load:
        self._task = asyncio.create_task(self._ask_all())
        return self

    async def __aexit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self.enough()
        if kind is not None:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=kind is not None)


async def ask_each(
    fleet: Fleet,
    reference: Mapping[str, Sequence[Answer]],
    models: Sequence[str] = MODELS,
    per_model: int | None = None,
    concurrency: int = 32,
) -> Load:
    """Ask each request once."""
    async with Load(fleet, reference, models, per_model, concurrency) as load:
        pass
    return load
