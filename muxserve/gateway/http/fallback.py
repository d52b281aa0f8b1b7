"""What answers in place of a model that is degraded or at its limit: another model of the fleet, or another endpoint.

The model itself is asked first. What it refuses (429, 503) is held back while the next one is asked; the client gets
the first refusal if nobody answers. Once anything was sent to the client, nothing else takes over.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp

from muxserve.gateway.http.body import BodyReplay, ClientGoneError
from muxserve.gateway.http.errors import Message, RequestError, Send
from muxserve.gateway.usage.usage_log import Used
from muxserve.spec import FallbackSpec

log = logging.getLogger(__name__)

# The header of an answer that another model or endpoint has made, with its name.
FALLBACK_HEADER = b"x-muxserve-fallback"
REFUSALS = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
CONNECT_SECONDS = 5.0
# The longest pause of an endpoint, also before its first token.
READ_SECONDS = 300.0
# An endpoint whose answer is one of these has not answered: its own trouble, or a wrong key, is not the client's.
_NO_ANSWERS = frozenset({401, 402, 403, 404, 408, 429, 500, 502, 503, 504})
_DATA = b"data:"
# More tokens than these are a mistake of whoever counts them.
_MOST_TOKENS = 1 << 53
# The routes whose streams say what they used if they are asked to.
_COUNTED = frozenset({"/v1/chat/completions", "/v1/completions"})


class FallbackError(Exception):
    """Another endpoint did not answer; the message says why."""


def chain(fallbacks: Mapping[str, FallbackSpec], model: str) -> list[FallbackSpec]:
    """Who is asked for `model`, in this order; the model itself is the first. Each is asked once."""
    steps = [FallbackSpec(model)]
    while not steps[-1].url and (after := fallbacks.get(steps[-1].model)) is not None and after not in steps:
        steps.append(after)
    return steps


class HeldAnswer:
    """ASGI's `send`, which keeps a refusal back until it is known whether somebody else answers."""

    __slots__ = ("_refusal", "_send", "begun")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._refusal: list[Message] = []
        # Something was sent to the client.
        self.begun = False

    @property
    def refused(self) -> bool:
        """Whether the answer was a refusal, and is held back."""
        return bool(self._refusal)

    async def __call__(self, message: Message) -> None:
        refuses = message["type"] == "http.response.start" and message["status"] in REFUSALS
        if self._refusal or refuses:
            self._refusal.append(message)
            return
        self.begun = True
        await self._send(message)

    async def release(self) -> None:
        """Send the refusal: nobody else answers."""
        for message in self._refusal:
            await self._send(message)


def for_model(body: bytes, model: str) -> bytes:
    """`body`, which is a JSON object, as a request for `model`."""
    return json.dumps({**json.loads(body), "model": model}).encode()


async def relay(endpoint: FallbackSpec, path: str, body: bytes, replay: BodyReplay, send: Send) -> Used:
    """Let another endpoint answer; returns what it says was used.

    Args:
        path: the route, such as /v1/chat/completions; it is looked for below the endpoint's URL.
        body: the client's, a JSON object.
        replay: says when the client has gone.

    Raises:
        FallbackError: it does not answer; nothing was sent to the client.
        RequestError: it breaks its answer off, of which the client has a part (502).
        ClientGoneError: the client has closed the connection.
    """
    asked = {**json.loads(body), "model": endpoint.model}
    options = asked.get("stream_options") or {}
    # What is no object, the endpoint refuses.
    hidden = path in _COUNTED and bool(asked.get("stream")) and isinstance(options, dict)
    hidden = hidden and not options.get("include_usage")
    if hidden:
        asked["stream_options"] = {**options, "include_usage": True}
    url = endpoint.url.rstrip("/") + path.removeprefix("/v1")
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
    gone = replay.watch()
    begun = False
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            answer = await _or_gone(session.post(url, json=asked), gone)
            async with answer:
                if answer.status in _NO_ANSWERS:
                    raise FallbackError(f"{endpoint.words} answered {answer.status}")
                kind = answer.headers.get("content-type", "application/json")
                used = Used()
                parts = _events(answer, used, hidden) if kind.startswith("text/event-stream") else _whole(answer, used)
                iterator = aiter(parts)
                # An endpoint that breaks off before its first event, or within a whole answer, has not answered.
                part = await _or_gone(anext(iterator, None), gone)
                begun = True
                start = {"type": "http.response.start", "status": answer.status}
                await send({**start, "headers": [(b"content-type", kind.encode("latin-1"))]})
                while part is not None:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    part = await _or_gone(anext(iterator, None), gone)
                await send({"type": "http.response.body", "body": b""})
                return used
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = str(error) or type(error).__name__
        if begun:
            raise RequestError(HTTPStatus.BAD_GATEWAY, f"{endpoint.words} broke off its answer: {why}") from error
        raise FallbackError(f"{endpoint.words} did not answer: {why}") from None


async def _or_gone(doing: Any, gone: asyncio.Future[Message]) -> Any:
    """What `doing` comes to, unless the client goes first."""
    task = asyncio.ensure_future(doing)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()


async def _whole(answer: aiohttp.ClientResponse, used: Used) -> AsyncIterator[bytes]:
    body = await answer.read()
    _count(body, used)
    yield body


async def _events(answer: aiohttp.ClientResponse, used: Used, hidden: bool) -> AsyncIterator[bytes]:
    """The events as they come, without the last one of what was used if that is `hidden`: the client has not asked for
    it."""
    async for event in _lines(answer):
        said = _said(event)
        if b'"usage"' in said and _count(said, used) and hidden and not json.loads(said).get("choices"):
            continue
        yield event


def _said(event: bytes) -> bytes:
    """The data of an event, which may have a name."""
    return next((line.removeprefix(_DATA) for line in event.split(b"\n") if line.startswith(_DATA)), b"")


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The events of a stream, each with the empty line behind it."""
    rest = b""
    async for chunk in answer.content.iter_any():
        *whole, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            yield event + b"\n\n"
    if rest:
        yield rest


def _count(text: bytes, used: Used) -> bool:
    """Take from a JSON answer, or an event of one, what was used, if it says so. Events of responses have it in the
    response; those of Anthropic's messages have the prompt's tokens in the message, and the answer's later."""
    try:
        said = json.loads(text)
        parts = (said, said.get("response"), said.get("message"))
        usage = next(part["usage"] for part in parts if part and part.get("usage"))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        prompt = _tokens(usage, "prompt_tokens", "input_tokens")
        output = _tokens(usage, "completion_tokens", "output_tokens")
        cached = _tokens(details, "cached_tokens")
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        return False
    used.prompt_tokens = used.prompt_tokens if prompt is None else prompt
    used.cached_tokens = used.cached_tokens if cached is None else cached
    used.output_tokens = used.output_tokens if output is None else output
    return True


def _tokens(usage: Mapping[str, Any], *names: str) -> int | None:
    """A number of tokens, under the first of these names that there is."""
    value = next((usage[name] for name in names if usage.get(name) is not None), None)
    return int(value) if isinstance(value, int | float) and 0 <= value <= _MOST_TOKENS else None
