"""Load on an OpenAI endpoint and what its clients see: TTFT, TPOT, end-to-end latency, throughput.

Prompts are token ids of exact length, and `ignore_eos` makes outputs exact too, so every server does the same work.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from report import percentiles

from muxserve.metrics import RequestRecord, time_per_token
from muxserve.metrics.summary import summarise

# Ids below are special tokens and bytes in the quickstart models' vocabularies; all of theirs are larger than the end.
FIRST_TOKEN, LAST_TOKEN = 10, 400


@dataclass(frozen=True)
class Call:
    """One request. `at` is when an open loop sends it, in seconds from the start; its prompt is of ids up to
    `last_token`. A server that gets the same `seed` again may have cached the prompt."""

    model: str
    prompt_tokens: int
    output_tokens: int
    seed: int | str = 0
    at: float = 0.0
    stream: bool = True
    last_token: int = LAST_TOKEN

    def body(self) -> dict[str, object]:
        """Body for `/v1/completions`."""
        rng = random.Random(f"{self.model}/{self.seed}")
        body: dict[str, object] = {
            "model": self.model,
            "prompt": [rng.randint(FIRST_TOKEN, self.last_token) for _ in range(self.prompt_tokens)],
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body


@dataclass
class Outcome:
    """What became of a call. Times are seconds of one clock; `first` and `last` are when the first and the last token
    arrived (both the whole answer's arrival without streaming). `error` is empty for a complete answer."""

    call: Call
    sent: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str = ""
    gaps: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.first - self.sent

    @property
    def e2e(self) -> float:
        """From sending to the last token, seconds."""
        return self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds; None for answers of one token."""
        return time_per_token(self.first, self.last, self.tokens)

    @property
    def record(self) -> RequestRecord:
        """In the terms of `muxserve.metrics`, its arrival being when it was sent. Without streaming nobody knows when
        the first token was made."""
        return RequestRecord(
            self.call.model,
            self.sent,
            self.call.prompt_tokens,
            self.tokens,
            first_token=self.first if self.call.stream else None,
            finish=self.last,
            error=self.error,
        )


def client(limit: int = 0) -> aiohttp.ClientSession:
    """A session that never waits for a connection of its own pool."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit), timeout=aiohttp.ClientTimeout(total=600), read_bufsize=1 << 18
    )


async def send(session: aiohttp.ClientSession, url: str, call: Call) -> Outcome:
    """Send one call and read its answer to the end. Never raises for what the server does: see `Outcome.error`."""
    body = call.body()
    outcome = Outcome(call, time.perf_counter())
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                outcome.error = f"HTTP {answer.status}: {(await answer.text())[:200]}"
            elif call.stream:
                await _read_stream(answer, outcome)
            else:
                usage = (await answer.json())["usage"]
                outcome.first = outcome.last = time.perf_counter()
                outcome.tokens = usage["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if outcome.ok and outcome.tokens != call.output_tokens:
        outcome.error = f"{outcome.tokens} tokens instead of {call.output_tokens}"
    return outcome


async def _read_stream(answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
    done = False
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        now = time.perf_counter()
        data = line[6:].strip()
        if data == b"[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            outcome.error = f"error in the stream: {chunk['error']}"
            return
        if chunk.get("choices"):
            if not outcome.first:
                outcome.first = now
            else:
                outcome.gaps.append(now - outcome.last)
            outcome.last = now
        if chunk.get("usage"):
            outcome.tokens = chunk["usage"]["completion_tokens"]
    if not done:
        outcome.error = "the stream ended early"


async def open_loop(urls: dict[str, str], calls: Sequence[Call]) -> list[Outcome]:
    """Send every call at its own time, whatever became of the others. `urls` has an endpoint for each model."""
    async with client() as session:
        start = asyncio.get_running_loop().time()

        async def one(call: Call) -> Outcome:
            await asyncio.sleep(max(0.0, start + call.at - asyncio.get_running_loop().time()))
            return await send(session, urls[call.model], call)

        return list(await asyncio.gather(*(one(call) for call in calls)))


async def closed_loop(url: str, calls: Sequence[Call], concurrency: int) -> list[Outcome]:
    """Keep `concurrency` calls under way until all are done."""
    waiting = iter(calls)
    outcomes: list[Outcome] = []
    async with client() as session:

        async def worker() -> None:
            for call in waiting:
                outcomes.append(await send(session, url, call))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Throughput over the time from the first request sent to the last token, and percentiles in milliseconds."""
    done = [outcome for outcome in outcomes if outcome.ok]
    result: dict[str, object] = {"requests": len(outcomes), "failed": len(outcomes) - len(done)}
    errors = sorted({outcome.error for outcome in outcomes if outcome.error})
    if errors:
        result["errors"] = errors[:5]
    if not done:
        return result
    figures = summarise(
        (outcome.record for outcome in outcomes), start=min(outcome.sent for outcome in outcomes)
    ).overall
    streamed = [outcome for outcome in done if outcome.call.stream]
    tpots = [outcome.tpot for outcome in streamed if outcome.tpot is not None]
    result |= {
        "seconds": round(figures.seconds, 3),
        "requests_per_second": round(figures.requests_per_second, 3),
        "output_tokens_per_second": round(figures.output_tokens_per_second, 1),
        "e2e_ms": percentiles([outcome.e2e * 1e3 for outcome in done]),
    }
    if streamed:
        result["ttft_ms"] = percentiles([outcome.ttft * 1e3 for outcome in streamed])
    if tpots:
        result["tpot_ms"] = percentiles([tpot * 1e3 for tpot in tpots])
    return result
