"""Everything at once: many streams of all sorts, and every moment another process dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import openai
import psutil

from tests.soak.faults import RESTARTED
from tests.soak.load import RIGHT, WRONG, Tally, judged
from tests.soak.parts import GRAMMARS, Part
from tests.soak.world import Kind, Struck, World

_STREAMS = 48
_SECONDS = 30.0
_EVERY_SECONDS = 1.5
# A client that was refused asks again after that.
_PAUSE_SECONDS = 0.5


def _schema(rng: random.Random) -> dict[str, Any]:
    """One of many, so that most have to be compiled."""
    return {
        "type": "object",
        "properties": {"answer": {"type": "integer"}, f"v{rng.randrange(500)}": {"type": "boolean"}},
        "required": ["answer"],
        "additionalProperties": False,
    }


async def _answer(client: openai.AsyncOpenAI, model: str, rng: random.Random) -> tuple[str, str]:
    """A stream to its end: a completion or a chat, of one or two choices, some with a schema. Each choice must end, and
    one with a schema must be JSON unless its tokens were used up."""
    count, structured = rng.choice((1, 1, 2)), rng.random() < 0.2
    extra: dict[str, Any] = {
        "max_tokens": 32,
        "temperature": 0.7,
        "n": count,
        "stream": True,
        "seed": rng.randrange(999),
    }
    if structured:
        form = {"name": "answer", "schema": _schema(rng)}
        extra["extra_body"] = {"response_format": {"type": "json_schema", "json_schema": form}}
    question = f"What is {rng.randrange(99)} plus {rng.randrange(99)}?"
    chat = rng.random() < 0.5
    texts, ends = [""] * count, [""] * count
    if chat:
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], **extra
        )
    else:
        stream = await client.completions.create(model=model, prompt=question, **extra)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content if chat else choice.text) or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    if not all(ends):
        return WRONG, f"{sum(not end for end in ends)} of {count} choices did not end"
    for text, end in zip(texts, ends, strict=True):
        if structured and end == "stop":
            try:
                json.loads(text)
            except ValueError:
                return WRONG, f"{text!r} is not as the schema says"
    return RIGHT, ""


@asynccontextmanager
async def streams(
    client: openai.AsyncOpenAI, models: list[str], rng: random.Random, tally: Tally, count: int = _STREAMS
) -> AsyncIterator[None]:
    """So many clients that ask without end; at the end of the block they have their last answers."""
    over = asyncio.Event()

    async def ask(chance: random.Random) -> None:
        while not over.is_set():
            model = chance.choice(models)
            one = partial(_answer, client, model, chance)
            outcome = await judged(tally, one, what=f"{model} in the chaos")
            if outcome != RIGHT:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), _PAUSE_SECONDS)

    asking = [asyncio.create_task(ask(random.Random(rng.random()))) for _ in range(count)]
    try:
        yield
        over.set()
        await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def kill_in_turn(world: World, seconds: float, every: float) -> list[Part]:
    """Every so many seconds one process of a kind that is chosen first, so that those of which there is one die as
    often as engines do."""
    killed: list[Part] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = world.parts(*RESTARTED, GRAMMARS)
        kind = world.rng.choice(sorted({part.kind for part in found}))
        part = world.rng.choice([part for part in found if part.kind == kind])
        with contextlib.suppress(psutil.NoSuchProcess):
            part.send(signal.SIGKILL)
            killed.append(part)
        await asyncio.sleep(every)
    return killed


async def chaos(world: World) -> Struck:
    """48 streams, and one process dies every 1.5 s. Afterwards each model answers."""
    client = world.fleet.async_client()
    try:
        async with streams(client, list(world.topology.models), world.rng, world.tally):
            killed = await kill_in_turn(world, _SECONDS, _EVERY_SECONDS)
            ended = time.monotonic()
        for model in world.topology.models:
            await judged(
                world.tally, partial(world.questions.ask, client, model, 0, True), what=f"{model} after the chaos"
            )
    finally:
        await client.close()
    return Struck(f"{_STREAMS} streams, and killed {len(killed)}: {', '.join(map(str, killed))}", killed, ended)


KINDS = (Kind("kills/one every 1.5 s under 48 streams", chaos),)
