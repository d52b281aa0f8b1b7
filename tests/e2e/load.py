"""Concurrent streamed chats against a fleet, compared with stock vLLM's answers."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from tests.e2e.fleet import Fleet
from tests.e2e.reference import MODELS, requests_for


async def stream_chat(client: openai.AsyncOpenAI, model: str, request: dict[str, Any]) -> dict[str, Any]:
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


async def all_requests(
    fleet: Fleet, concurrency: int = 32, per_model: int | None = None
) -> dict[tuple[str, int], dict[str, Any]]:
    """Every request of every model (or the first `per_model`), `concurrency` at a time, models interleaved."""
    gate = asyncio.Semaphore(concurrency)
    client = fleet.async_client()
    answers: dict[tuple[str, int], dict[str, Any]] = {}

    async def one(model: str, index: int, request: dict[str, Any]) -> None:
        async with gate:
            answers[model, index] = await stream_chat(client, model, request)

    work = [
        one(model, index, request)
        for index in range(per_model or len(requests_for(MODELS[0])))
        for model in MODELS
        for request in [requests_for(model)[index]]
    ]
    await asyncio.gather(*work)
    return answers


def differences(answers: dict[tuple[str, int], dict[str, Any]], reference: dict[str, Any]) -> dict[str, Any]:
    """Where the fleet's answers are not stock vLLM's."""
    return {
        f"{model}[{index}]": (answer, reference[model][index])
        for (model, index), answer in answers.items()
        if answer != reference[model][index]
    }
