"""`/openapi.json` is made once, until models come that serve other paths."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client import CollectorRegistry

from muxserve.gateway.http.errors import Message, Receive, Scope, Send
from muxserve.gateway.http.served_app import POSTS, ServedApp
from muxserve.gateway.status.routes import StatusRoutes

EMBEDDINGS = "/v1/embeddings"


async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("not asked")


async def test_it_is_made_once_for_models_that_serve_the_same() -> None:
    made: list[str] = []
    models: dict[str, ServedApp] = {}

    def offer(name: str, *posts: str) -> None:
        def document() -> dict[str, Any]:
            made.append(name)
            return {"paths": {path: {"post": {"summary": name}} for path in posts}}

        models[name] = ServedApp(nobody, {}, document, frozenset(posts))

    nothing: Any = None
    routes = StatusRoutes(nothing, nothing, CollectorRegistry(), CollectorRegistry(), nothing, "0", models)

    async def paths() -> set[str]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await routes.openapi({"headers": []}, send)
        return set(json.loads(sent[1]["body"])["paths"]) & POSTS

    offer("first", "/v1/completions")
    for _ in range(3):
        assert await paths() == {"/v1/completions"}
    offer("alike", "/v1/completions")
    assert await paths() == {"/v1/completions"}
    assert made == ["first"]
    offer("other", EMBEDDINGS)
    for _ in range(2):
        assert await paths() == {"/v1/completions", EMBEDDINGS}
    assert len(made) == 3
    del models["other"]
    assert await paths() == {"/v1/completions"}
