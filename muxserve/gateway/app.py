"""The endpoint: routes every HTTP request to its model's stock vLLM application.

    /v1/...                  by the `model` field of the body
    /tokenize, /detokenize   likewise
    /models/NAME/...         the same for one model
    /v1/models               all models
    /health /metrics /fleet  about the server

Only routes that serve are passed on; what vLLM offers for the administration of its own engine is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from muxserve.gateway.admission import Keys, presented_key
from muxserve.gateway.body import ClientGoneError, Replay, model_of, read_body
from muxserve.gateway.errors import App, Receive, RequestError, Scope, Send, respond_error, respond_json
from muxserve.gateway.measure import HttpRequest, Measures, current_http
from muxserve.gateway.turnstile import Turnstile

log = logging.getLogger(__name__)

# Served under the model's limits.
GENERATE = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"}
)
# Served at once: they need no engine.
COMPUTE = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/completions/render",
        "/v1/chat/completions/render",
    }
)
POSTS = GENERATE | COMPUTE
MODELS = "/models/"

Page = Callable[[Send], Awaitable[None]]


class Endpoint:
    """The ASGI application of a gateway.

    Args:
        apps: each model's application.
        cards: each model's entry in `/v1/models`.
        keys: who may come in.
        turnstile: how many of them at once.
        measures: where rejections are counted.
        pages: answers of paths about the server itself, for GET.
        open_pages: those of them that need no key.
        max_body_bytes: the largest body taken.
    """

    def __init__(
        self,
        apps: Mapping[str, App],
        cards: Mapping[str, object],
        keys: Keys,
        turnstile: Turnstile,
        measures: Measures,
        pages: Mapping[str, Page],
        open_pages: frozenset[str],
        max_body_bytes: int,
    ) -> None:
        self._apps = dict(apps)
        self._cards = dict(cards)
        self._keys = keys
        self._turnstile = turnstile
        self._measures = measures
        self._pages = dict(pages)
        self._open_pages = open_pages
        self._max_body_bytes = max_body_bytes
        self._only = next(iter(self._apps)) if len(self._apps) == 1 else None
        self.draining = False
        self.ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _decline(scope, receive, send)
            return
        http = HttpRequest(time.monotonic())
        current_http.set(http)
        try:
            await self._route(scope, receive, send, http)
        except RequestError as error:
            await respond_error(send, error)
        except ClientGoneError:
            pass

    async def _route(self, scope: Scope, receive: Receive, send: Send, http: HttpRequest) -> None:
        path: str = scope["path"]
        if path not in self._open_pages and not self._keys.allow(presented_key(scope["headers"])):
            self._measures.rejected("", "key")
            raise RequestError(
                HTTPStatus.UNAUTHORIZED,
                "no valid API key: send one of this server's keys in the header 'Authorization: Bearer KEY'",
                headers=[(b"www-authenticate", b"Bearer")],
            )
        name = None
        if path.startswith(MODELS):
            name, _, rest = path.removeprefix(MODELS).partition("/")
            if name not in self._apps:
                raise self._unknown_model(name)
            path = f"/{rest}"
            if path in ("/", "/v1/models"):
                _only_get(scope)
                await respond_json(send, {"object": "list", "data": [self._cards[name]]})
                return
        elif path in self._pages:
            _only_get(scope)
            await self._pages[path](send)
            return
        elif path == "/v1/models":
            _only_get(scope)
            await respond_json(send, {"object": "list", "data": list(self._cards.values())})
            return
        elif path.startswith("/v1/models/"):
            _only_get(scope)
            await self._card(path.removeprefix("/v1/models/"), send)
            return
        if path not in POSTS:
            raise RequestError(
                HTTPStatus.NOT_FOUND, f"no such path: {scope['path']}; see docs/gateway.md for those served"
            )
        if scope["method"] != "POST":
            raise RequestError(
                HTTPStatus.METHOD_NOT_ALLOWED, f"{scope['path']} takes POST only", headers=[(b"allow", b"POST")]
            )
        await self._serve(name, path, scope, receive, send, http)

    async def _serve(
        self, name: str | None, path: str, scope: Scope, receive: Receive, send: Send, http: HttpRequest
    ) -> None:
        if self.draining:
            raise self._shutting_down(name)
        body = await read_body(receive, scope["headers"], self._max_body_bytes)
        asked = model_of(body)
        if name is None:
            name = self._model(asked)
        replay = Replay(receive, body, http)
        inner = {**scope, "path": path, "raw_path": path.encode()} if path != scope["path"] else scope
        try:
            if path in GENERATE:
                async with self._turnstile.turn(name, replay):
                    if self.ended:  # while it waited for its turn
                        raise self._shutting_down(name)
                    await self._apps[name](inner, replay, send)
            else:
                await self._apps[name](inner, replay, send)
        finally:
            replay.unwatch()

    def _model(self, asked: str | None) -> str:
        if asked is None:
            if self._only is not None:
                return self._only
            raise RequestError(
                HTTPStatus.BAD_REQUEST,
                f"'model' is missing; this server has {self._names()}",
                param="model",
            )
        if asked not in self._apps:
            raise self._unknown_model(asked)
        return asked

    async def _card(self, name: str, send: Send) -> None:
        if name not in self._cards:
            raise self._unknown_model(name)
        await respond_json(send, self._cards[name])

    def _shutting_down(self, name: str | None) -> RequestError:
        self._measures.rejected(name or "", "draining")
        return RequestError(
            HTTPStatus.SERVICE_UNAVAILABLE, "this server is shutting down", headers=[(b"retry-after", b"5")]
        )

    def _unknown_model(self, name: str) -> RequestError:
        self._measures.rejected("", "unknown_model")
        shown = name if len(name) <= 100 else f"{name[:100]}..."
        return RequestError(
            HTTPStatus.NOT_FOUND, f"the model {shown!r} does not exist; this server has {self._names()}", param="model"
        )

    def _names(self) -> str:
        return ", ".join(self._apps)


def _only_get(scope: Scope) -> None:
    if scope["method"] not in ("GET", "HEAD"):
        raise RequestError(
            HTTPStatus.METHOD_NOT_ALLOWED, f"{scope['path']} takes GET only", headers=[(b"allow", b"GET")]
        )


async def _decline(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer what is not plain HTTP: nothing is to be done at start and end, and there are no web sockets."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    elif scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1003})
