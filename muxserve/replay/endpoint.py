"""One OpenAI-compatible endpoint over HTTP: which models it has, what it understands, and one request's answer."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType

import aiohttp
import msgspec

from muxserve.replay.dialect import DIALECTS, Dialect, Usage, chunk_decoder, error_words
from muxserve.replay.prompts import Prompts

_PROBE_TOKENS = 32
_REFUSED = (400, 404, 405, 415, 422, 501)


class EndpointError(Exception):
    """The endpoint cannot be used; the message says what to do."""


@dataclass(slots=True)
class EndpointAnswer:
    """What became of a request. Times are of `perf_counter`; `first` and `last` are when its first and last token came.
    `error` is empty for a complete answer, whose `tokens` the server counted (or its pieces, where it does not)."""

    sent: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    prompt_tokens: int | None = None
    error: str = ""
    status: int = 0


class _Models(msgspec.Struct):
    class _Model(msgspec.Struct):
        id: str

    data: list[_Model]


class Endpoint:
    """Use it in `async with`. `timeout` is seconds for a whole request."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        # Every request under way holds a socket.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=30),
            headers=self._headers,
            read_bufsize=1 << 18,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._open.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the endpoint is used outside its `async with`")
        return self._session

    async def models(self) -> list[str]:
        """Names of the models it serves.

        Raises:
            EndpointError: there is none, it wants another key, or it is no OpenAI endpoint.
        """
        try:
            async with self._open.get(f"{self.url}/v1/models", timeout=aiohttp.ClientTimeout(total=30)) as answer:
                body = await answer.read()
        except aiohttp.InvalidURL:
            raise EndpointError(f"{self.url!r} is not a URL such as http://127.0.0.1:8000") from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EndpointError(f"no answer from {self.url}: {_words(error)}") from None
        if answer.status in (401, 403):
            raise EndpointError(f"{self.url} wants an API key: give --api-key or set MUXSERVE_API_KEY")
        try:
            if answer.status == 200:
                return [model.id for model in msgspec.json.decode(body, type=_Models).data]
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        raise EndpointError(
            f"{self.url}/v1/models answered {answer.status}: {error_words(body)}; is this an OpenAI endpoint?"
        )

    async def probe(self, model: str, prompts: Prompts) -> Dialect:
        """How `model` can be asked, found out by asking it for one or two tokens.

        Raises:
            EndpointError: it understands nothing of what we know, or does not answer.
        """
        said = ""
        for dialect in DIALECTS:
            answer = await self.send(dialect, dialect.body(prompts, 0, model, _PROBE_TOKENS, 2))
            if not answer.error:
                if not dialect.ids and answer.prompt_tokens:
                    # Chat templates add some tokens, and rare words are several: aim at what the server counts.
                    return dataclasses.replace(dialect, words_per_token=_PROBE_TOKENS / answer.prompt_tokens)
                return dialect
            said = said or answer.error
            if answer.status in (401, 403):
                raise EndpointError(f"{self.url} refuses the API key: {answer.error}")
            if answer.status not in _REFUSED:
                raise EndpointError(f"{self.url} did not answer a first request to {model}: {answer.error}")
        raise EndpointError(f"{self.url} takes neither completions nor chat completions for {model}: {said}")

    async def send(self, dialect: Dialect, body: bytes) -> EndpointAnswer:
        """Send a request and read its answer to the end. What the server does raises nothing: see its `error`."""
        answer = EndpointAnswer(perf_counter())
        try:
            async with self._open.post(self.url + dialect.path, data=body) as response:
                answer.status = response.status
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {error_words(await response.read())}"
                else:
                    await _read_stream(response, answer)
        except TimeoutError:
            answer.error = f"no complete answer within {self._timeout:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            answer.error = _words(error)
        return answer


async def _read_stream(response: aiohttp.ClientResponse, answer: EndpointAnswer) -> None:
    usage: Usage | None = None
    pieces = 0
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now = perf_counter()
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        try:
            chunk = chunk_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            answer.error = f"the stream holds something that is not a completion: {error}"
            return
        if chunk.error is not None:
            answer.error = f"error in the stream: {error_words(chunk.error)}"
            return
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            if choice.has_token:
                pieces += 1
                answer.first = now if answer.first is None else answer.first
                answer.last = now
            elif choice.finish_reason is not None and (choice.delta is None or answer.last is not None):
                # A completion may have ended before any text.
                answer.first = now if answer.first is None else answer.first
                answer.last = now
    if not done:
        answer.error = "the stream ended early"
    elif answer.last is None:
        answer.error = "the answer is empty"
    answer.tokens = usage.completion_tokens if usage is not None and usage.completion_tokens else pieces
    answer.prompt_tokens = usage.prompt_tokens if usage is not None and usage.prompt_tokens else None


def _words(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "the server closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection broke in the middle of the answer"
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "timed out"
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
