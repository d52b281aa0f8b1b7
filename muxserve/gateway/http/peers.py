"""The other gateways of the fleet: whoever scrapes reaches only one of them, and wants to know of all."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

import aiohttp

from muxserve.gateway.http.errors import RequestError, Scope, Send, retry_after
from muxserve.spec import FleetSpec

log = logging.getLogger(__name__)

# Where a gateway tells the others its own metrics, on its Unix socket and nowhere else of use.
OWN_METRICS = "/metrics/own"
# Behind the path of metrics: every series, not only what is of use.
FULL = "/full"
TIMEOUT_SECONDS = 1.0
# Headers of a request that another gateway gets when it answers for this one.
_RELAYED = frozenset({b"authorization", b"x-api-key", b"x-request-id"})

_SAMPLE = re.compile(r"^([^{ ]+)({)?", re.MULTILINE)


def bind_beside(fleet: FleetSpec, index: int) -> socket.socket:
    """The Unix socket on which gateway `index` serves the other gateways, bound and not listening yet."""
    path = Path(_socket(fleet, index))
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


class OtherGateways:
    """Asks the other gateways for what they alone know."""

    def __init__(self, fleet: FleetSpec, index: int) -> None:
        self.index = index
        self._others = {other: _socket(fleet, other) for other in range(fleet.gateway.count) if other != index}

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
            RequestError: it does not (503).
        """
        url = f"http://gateway{quote(scope['path'])}?{scope.get('query_string', b'').decode('latin-1')}"
        headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in scope["headers"] if n in _RELAYED]
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS)
        begun = False
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(self._others[index]), timeout=timeout) as session,
                session.request(scope["method"], url, headers=headers) as answer,
            ):
                kind = answer.headers.get("content-type", "application/json").encode("latin-1")
                start = {"type": "http.response.start", "status": answer.status, "headers": [(b"content-type", kind)]}
                await send(start)
                begun = True
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (KeyError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("another gateway did not answer %s: %r", url, error)
            if begun:
                raise
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


def _socket(fleet: FleetSpec, index: int) -> str:
    return fleet.socket(f"http-{index}")
