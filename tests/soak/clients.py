"""Faults of clients: they cancel, flood, dawdle, ask for too much, or for what nobody can answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.e2e.load import stream_chat
from tests.soak.hostile import BODIES, GRAMMARS
from tests.soak.load import CANCELLED, ENDS_SECONDS, FAILED, REJECTED, RIGHT, WRONG, judge_status, judged
from tests.soak.world import Kind, Strike, Struck, World
from tests.support.patience import PATIENCE


class _LeavesError(Exception):
    """A client gives up in the middle of its request."""


async def cancel_many(world: World) -> Struck:
    """Streams that are left by their clients at any time, many of them at once."""
    client = world.fleet.async_client()

    async def one(seconds: float) -> tuple[str, str]:
        model, index = world.questions.any(world.rng)
        task = asyncio.create_task(world.questions.ask(client, model, index, stream=True))
        done, _ = await asyncio.wait([task], timeout=seconds)
        if done:
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return CANCELLED, ""

    count, moment = 150, world.rng.uniform(0.2, 1.5)
    # Half of them at one moment, the others whenever they like.
    times = [moment if n % 2 else world.rng.uniform(0, 2) for n in range(count)]
    await asyncio.gather(*(judged(world.tally, lambda s=s: one(s), what="a stream that may be left") for s in times))
    await client.close()
    return Struck(f"opened {count} streams and left them, half of them {moment:.1f} s later at once")


async def overload(world: World) -> Struck:
    """Far more requests than can be served, within seconds."""
    client, count = world.fleet.async_client(), 300
    began = time.monotonic()

    async def one(delay: float) -> None:
        await asyncio.sleep(delay)
        model, index = world.questions.any(world.rng)
        await judged(
            world.tally,
            lambda: world.questions.ask(client, model, index, stream=True),
            what=f"{model}[{index}] in a burst",
        )

    await asyncio.gather(*(one(world.rng.uniform(0, 5)) for _ in range(count)))
    await client.close()
    return Struck(f"{count} requests within 5 s, the last of which ended after {time.monotonic() - began:.0f} s")


async def many_prompts(world: World) -> Struck:
    """One request with hundreds of prompts."""
    client, count = world.fleet.async_client(), 400
    model = world.rng.choice(list(world.questions.models))

    async def batch() -> tuple[str, str]:
        answer = await client.completions.create(
            model=model, prompt=[f"What is {n} plus {n}?" for n in range(count)], max_tokens=8, temperature=0
        )
        complete = sorted(choice.index for choice in answer.choices) == list(range(count))
        return (RIGHT, "") if complete else (WRONG, f"{len(answer.choices)} choices for {count} prompts")

    await judged(world.tally, batch, what=f"{count} prompts in a request", deserves=[REJECTED])
    await client.close()
    return Struck(f"one request of {count} prompts to {model}")


async def hostile_grammars(world: World) -> Struck:
    """Some grammars that cost much, or are none, beside some that are well."""
    client = world.fleet.async_client()
    names = world.rng.sample(sorted(GRAMMARS), 4)
    model = world.rng.choice(list(world.questions.models))
    question: Any = [{"role": "user", "content": "What is 12 + 7?"}]

    async def hostile(extra: dict[str, Any]) -> tuple[str, str]:
        answer = await client.chat.completions.create(
            model=model, messages=question, max_tokens=8, temperature=0, extra_body=extra
        )
        # It is no fault to have served it.
        return RIGHT, str(answer.choices[0].finish_reason)

    async def well(number: int) -> tuple[str, str]:
        await asyncio.sleep(0.3 * number)
        pattern = "[0-9]{1,3} (apples|pears)"
        answer = await client.chat.completions.create(
            model=model,
            messages=question,
            max_tokens=40,
            temperature=0,
            extra_body={"structured_outputs": {"regex": pattern}},
        )
        text = answer.choices[0].message.content or ""
        return (RIGHT, "") if re.fullmatch(pattern, text) else (WRONG, f"{text!r} does not match {pattern}")

    await asyncio.gather(
        *(
            judged(
                world.tally,
                lambda name=name: hostile(GRAMMARS[name]()),
                what=f"grammar: {name}",
                deserves=[REJECTED],
            )
            for name in names
        ),
        *(judged(world.tally, lambda n=n: well(n), what="a structured output beside others") for n in range(4)),
    )
    await client.close()
    return Struck(f"asked {model} for {', '.join(names)}")


async def bad_bodies(world: World) -> Struck:
    """Requests that no server can make sense of."""
    names = world.rng.sample(sorted(BODIES), 8)
    model = world.rng.choice(list(world.questions.models))
    async with httpx.AsyncClient(base_url=world.fleet.url, verify=False, timeout=PATIENCE) as client:

        async def one(name: str) -> tuple[str, str]:
            path, body = BODIES[name](model)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
            if answer.status_code == 200:
                return RIGHT, ""
            return judge_status(answer.status_code, answer.text, answer.headers)

        await asyncio.gather(
            *(judged(world.tally, lambda n=n: one(n), what=f"body: {n}", deserves=[REJECTED]) for n in names)
        )
    return Struck(f"sent {model} {', '.join(names)}")


def poison_step(how: str, words: str) -> Strike:
    """A request whose step goes wrong, in the middle of others."""

    async def strike(world: World) -> Struck:
        client, model = world.fleet.async_client(), world.topology.poisoned
        at = world.rng.choice((0, 1, 5))

        async def one() -> tuple[str, str]:
            extra = {"vllm_xargs": {"poison": how, "poison_at": at}, "ignore_eos": True}
            messages = [{"role": "user", "content": "Hello?"}]
            await stream_chat(client, model, {"messages": messages, "max_tokens": 12, "extra_body": extra})
            return WRONG, f"its step {words}, and it was answered"

        outcome = await judged(
            world.tally,
            one,
            what=f"{model}, a request whose step {words} at output token {at}",
            deserves=[FAILED, REJECTED],
        )
        await client.close()
        return Struck(f"a request to {model} whose step {words} at output token {at}: {outcome}")

    return strike


async def flood(world: World, count: int, seconds: float) -> str:
    """Connections that say nothing, half a request, or ask and do not listen; closed after so many seconds."""
    port = int(world.fleet.url.rsplit(":", 1)[1])
    writers: list[asyncio.StreamWriter] = []
    said = (
        b"",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Le",
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    )
    refused = 0

    async def one(number: int) -> None:
        nonlocal refused
        try:
            async with asyncio.timeout(seconds):
                _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writers.append(writer)
            writer.write(said[number % len(said)])
        except (OSError, TimeoutError):
            refused += 1

    try:
        await asyncio.gather(*(one(number) for number in range(count)))
        await asyncio.sleep(seconds)
    finally:
        for writer in writers:
            writer.transport.abort()
    return f"{count} connections that are no use to anybody, {refused} of which were refused"


async def connection_flood(world: World) -> Struck:
    return Struck(await flood(world, 1500, 5.0))


async def slow_readers(world: World) -> Struck:
    """Streams that are read a piece at a time, and not at all for some seconds."""
    count, pause = 16, world.rng.uniform(4, 10)
    timeout = httpx.Timeout(ENDS_SECONDS)
    async with httpx.AsyncClient(base_url=world.fleet.url, verify=False, timeout=timeout) as client:

        async def one() -> tuple[str, str]:
            model, index = world.questions.any(world.rng)
            request = dict(world.questions.request(model, index))
            request |= request.pop("extra_body", {})
            request |= {"model": model, "stream": True, "stream_options": {"include_usage": True}}
            answer: dict[str, Any] = {"text": "", "finish": None, "prompt_tokens": 0, "completion_tokens": 0}
            async with client.stream("POST", "/v1/chat/completions", json=request) as response:
                if response.status_code != 200:
                    await response.aread()
                    return judge_status(response.status_code, response.text, response.headers)
                await asyncio.sleep(pause)
                async for line in response.aiter_lines():
                    await asyncio.sleep(0.02)
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            return FAILED, f"in the stream: {chunk}"
                        _add(answer, chunk)
            return world.questions.judge(model, index, answer)

        await asyncio.gather(*(judged(world.tally, one, what="a stream that is read slowly") for _ in range(count)))
    return Struck(f"{count} streams that were not read for {pause:.0f} s and slowly afterwards")


def _add(answer: dict[str, Any], chunk: dict[str, Any]) -> None:
    if chunk.get("usage"):
        answer |= {key: chunk["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    for choice in chunk["choices"]:
        answer["text"] += choice["delta"].get("content") or ""
        answer["finish"] = choice["finish_reason"] or answer["finish"]


async def slow_writers(world: World) -> Struck:
    """Bodies that come in small pieces; some of them never to their end."""
    count = 16
    async with httpx.AsyncClient(base_url=world.fleet.url, verify=False, timeout=httpx.Timeout(ENDS_SECONDS)) as client:

        async def one(number: int) -> tuple[str, str]:
            model, index = world.questions.any(world.rng)
            request = dict(world.questions.request(model, index))
            request |= request.pop("extra_body", {})
            body = json.dumps(request | {"model": model}).encode()
            leaves = number % 4 == 3

            async def pieces() -> AsyncIterator[bytes]:
                step = max(1, len(body) // 40)
                for at in range(0, len(body), step):
                    if leaves and at > len(body) // 2:
                        raise _LeavesError
                    yield body[at : at + step]
                    await asyncio.sleep(0.1)

            try:
                answer = await client.post(
                    "/v1/chat/completions", content=pieces(), headers={"Content-Type": "application/json"}
                )
            except _LeavesError:
                return CANCELLED, ""
            if answer.status_code != 200:
                return judge_status(answer.status_code, answer.text, answer.headers)
            said = answer.json()
            (choice,) = said["choices"]
            return world.questions.judge(
                model,
                index,
                {
                    "text": choice["message"]["content"] or "",
                    "finish": choice["finish_reason"],
                    "prompt_tokens": said["usage"]["prompt_tokens"],
                    "completion_tokens": said["usage"]["completion_tokens"],
                },
            )

        await asyncio.gather(
            *(judged(world.tally, lambda n=n: one(n), what="a body that comes slowly") for n in range(count))
        )
    return Struck(f"{count} bodies in small pieces within 4 s, a quarter of them never to the end")


KINDS = (
    Kind("cancels/many at once", cancel_many),
    Kind("overload/burst", overload),
    Kind("overload/many prompts in one request", many_prompts),
    Kind("grammars/hostile", hostile_grammars),
    Kind("poison/bad bodies", bad_bodies),
    Kind("poison/step that raises", poison_step("raise", "raises")),
    Kind("poison/step that kills its engine", poison_step("kill", "kills its engine")),
    Kind("poison/step that hangs", poison_step("hang", "hangs")),
    Kind("connections/flood", connection_flood),
    Kind("connections/slow readers", slow_readers),
    Kind("connections/slow writers", slow_writers),
)
