"""Completions over token ids against a fleet on a GPU, compared with stock vLLM's."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from tests.e2e.fleet import Fleet
from tests.gpu.run import STAND_INS
from tests.gpu.stock import TOKENS, first_difference

# Keys of every model of the fleets, and of their `cluster`.
MODEL = {
    "dtype": "bfloat16",
    "engines": "split",
    "max_len": 1024,
    "max_num_seqs": 32,
    "engine_args": {"enforce_eager": True},
}
CLUSTER = {"gpus": 1, "gpu_memory": 0.2}
# bfloat16 keeps 8 bits: logits near 16 are told apart by 0.125 at best, and two of them come into a difference.
NEAR_TIE = 0.3
# The share of answers that must be the same token by token.
IDENTICAL = 0.9


async def complete(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> list[int]:
    """Stream one greedy completion of `TOKENS` tokens; returns their ids, over stand-ins of the driver zeros."""
    tokens: list[int] = []
    finish = None
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        logprobs=openai.omit if STAND_INS else 0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_tokens_as_token_ids": True, "ignore_eos": True},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs is not None and choice.logprobs.tokens:
                tokens += [int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens]
            finish = choice.finish_reason or finish
        if STAND_INS and chunk.usage is not None:
            tokens = [0] * chunk.usage.completion_tokens
    assert finish == "length", finish
    assert len(tokens) == TOKENS
    return tokens


async def all_answers(
    fleet: Fleet, reference: dict[str, Any], until: asyncio.Event | None = None, concurrency: int = 32
) -> list[tuple[str, int, list[int]]]:
    """Every request of the reference, models interleaved, again and again `until` that is set; once without it."""
    gate = asyncio.Semaphore(concurrency)
    client = fleet.async_client()
    found: list[tuple[str, int, list[int]]] = []

    async def one(model: str, index: int) -> None:
        async with gate:
            found.append((model, index, await complete(client, model, reference[model][index]["prompt"])))

    rounds = max(map(len, reference.values()))
    while True:
        await asyncio.gather(*(one(m, i) for i in range(rounds) for m in reference if i < len(reference[m])))
        if until is None or until.is_set():
            return found


def check(answers: list[tuple[str, int, list[int]]], reference: dict[str, Any]) -> str:
    """Refuse answers that leave stock vLLM's where that was not a near tie; says how many were the same.

    Raises:
        AssertionError: which answers, where and by how much.
    """
    wrong, same = {}, 0
    for model, index, tokens in answers:
        difference = first_difference(tokens, reference[model][index])
        if difference is None:
            same += 1
        elif difference[1] > NEAR_TIE:
            wrong[f"{model}[{index}]"] = difference
    assert not wrong, f"token and gap in nats where answers leave stock vLLM's: {wrong}"
    assert same >= IDENTICAL * len(answers), f"only {same} of {len(answers)} answers are the same"
    if STAND_INS:
        return f"{len(answers)} answers have all of their tokens, whose values mean nothing over stand-ins"
    return f"{same} of {len(answers)} answers identical, the others from a near tie on"
