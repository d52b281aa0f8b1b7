"""The other gateways of the fleet: whoever scrapes reaches only one of them, and wants to know of all. And those of a
fleet that this one takes units over from, or gives them to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import socket
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

import aiohttp

from muxserve.gateway.http.body import ClientGoneError
from muxserve.gateway.http.errors import Receive, RequestError, Scope, Send, retry_after
from muxserve.spec import FleetSpec, OtherFleet

log = logging.getLogger(__name__)

# Where a gateway tells the others its own metrics, on its Unix socket and nowhere else of use.
OWN_METRICS = "/metrics/own"
# Behind the path of metrics: every series, not only what is of use.
FULL = "/full"
TIMEOUT_SECONDS = 1.0
# Headers of a request that another gateway gets when it answers for this one.
_RELAYED = frozenset({b"authorization", b"x-api-key", b"x-request-id"})
# Headers that are not passed on with whole requests and answers: each connection has its own, and each gateway sets the
# last one.
_OF_CONNECTION = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"host",
        b"keep-alive",
        b"server",
        b"transfer-encoding",
        b"x-request-id",
    }
)

_SAMPLE = re.compile(r"^([^{ ]+)({)?", re.MULTILINE)


def bind_beside(fleet: FleetSpec, index: int) -> socket.socket:
    """The Unix socket on which gateway `index` serves the other gateways, bound and not listening yet."""
    path = Path(fleet.gateway_sockets[index])
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


class _UnreachableError(Exception):
    """A gateway does not answer, and nothing was sent to the client."""


def is_from_client(scope: Scope) -> bool:
    """Whether a request came to the endpoint's address, and not to the socket for other gateways."""
    server = scope.get("server")
    return server is None or server[1] is not None


async def ask_other_fleet(
    other: OtherFleet, request_id: str, body: bytes, scope: Scope, receive: Receive, send: Send
) -> bool:
    """Let a gateway of the other fleet answer a request whose `body` was read; False: none of them answers, and nothing
    was sent.

    Raises:
        ClientGoneError: the client did not wait for the end.
        RequestError: it breaks its answer off (502).
    """
    headers = [
        *((n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"] if n not in _OF_CONNECTION),
        ("x-request-id", request_id),
    ]

    async def passing() -> bool:
        for path in random.sample(other.sockets, len(other.sockets)):
            with contextlib.suppress(_UnreachableError):
                await _pass_on(path, headers, body, scope, send)
                return True
        return False

    answering, leaving = asyncio.ensure_future(passing()), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientGoneError
        return answering.result()
    finally:
        for each in (answering, leaving):
            each.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pass_on(path: str, headers: Sequence[tuple[str, str]], body: bytes, scope: Scope, send: Send) -> None:
    """Let the gateway at the Unix socket `path` answer.

    Raises:
        RequestError: it breaks its answer off (502).
        _UnreachableError: it does not.
    """
    url = f"http://gateway{quote(scope['path'])}?{scope.get('query_string', b'').decode('latin-1')}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS)
    begun = False
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path), timeout=timeout, auto_decompress=False
            ) as session,
            session.request(scope["method"], url, headers=headers, data=body or None) as answer,
        ):
            kept = [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in answer.headers.items()
                if name.lower().encode("latin-1") not in _OF_CONNECTION
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            begun = True
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        log.info("another gateway did not answer %s: %r", url, error)
        if begun:
            message = "the gateway of this server that answered broke off; ask again"
            raise RequestError(HTTPStatus.BAD_GATEWAY, message) from error
        raise _UnreachableError from None


class OtherGateways:
    """Asks the other gateways for what they alone know."""

    def __init__(self, fleet: FleetSpec, index: int) -> None:
        self.index = index
        self._others = {other: path for other, path in enumerate(fleet.gateway_sockets) if other != index}

    def __bool__(self) -> bool:
        return bool(self._others)

    async def metrics(self, full: bool) -> dict[int, str]:
        """The Prometheus text of each other gateway that answers."""
        return await self.ask(f"{OWN_METRICS}{FULL if full else ''}")

    async def ask(self, path: str) -> dict[int, str]:
        """What each other gateway that answers has at `path`."""
        texts = await asyncio.gather(*(self._ask(each, f"http://gateway{path}") for each in self._others.values()))
        return {index: text for index, text in zip(self._others, texts, strict=True) if text is not None}

    async def relay(self, index: int, scope: Scope, send: Send) -> None:
        """Let gateway `index` answer a request that has no body.

        Raises:
            RequestError: it does not (503), or breaks its answer off (502).
        """
        headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"] if n in _RELAYED]
        try:
            await _pass_on(self._others[index], headers, b"", scope, send)
        except (KeyError, _UnreachableError):
            raise RequestError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the gateway that makes this response does not answer; try again in a moment",
                headers=[retry_after(1)],
            ) from None

    async def _ask(self, socket_path: str, url: str) -> str | None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket_path), timeout=timeout) as session,
                session.get(url) as answer,
            ):
                return await answer.text() if answer.status == HTTPStatus.OK else None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("another gateway did not answer %s: %r", url, error)
            return None


def joined(texts: Iterable[tuple[int, str]]) -> str:
    """Prometheus texts of several gateways as one: each sample says in a label `gateway` whose it is."""
    families: dict[str, list[str]] = {}
    for index, text in texts:
        for block in re.split(r"^(?=# HELP )", text, flags=re.MULTILINE):
            if not block:
                continue
            header, samples = _parts(block)
            known = families.setdefault(header.split(" ", 3)[2], [header])
            known.append(_SAMPLE.sub(lambda found: _labelled(found, index), samples))  # noqa: B023 (used at once)
    return "".join(part for parts in families.values() for part in parts)


def _parts(block: str) -> tuple[str, str]:
    """A family's lines that begin with #, and its samples."""
    lines = block.splitlines(keepends=True)
    return "".join(line for line in lines if line[0] == "#"), "".join(line for line in lines if line[0] != "#")


def _labelled(found: re.Match[str], index: int) -> str:
    return f'{found[1]}{{gateway="{index}"' + ("," if found[2] else "}")
