"""A model as the endpoint offers it, and the paths for POST: they are vLLM's own, and a model has those of its task."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from muxserve.gateway.http.errors import App

# Served under the model's limits.
GENERATE = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"}
)
# Answered with vectors, also under the model's limits: an embedding model has `/v1/embeddings`, a classifier
# `/classify`, and what can compare two texts has the routes for scores and rankings.
POOLING = frozenset(
    {
        "/v1/embeddings",
        "/v2/embed",
        "/classify",
        "/pooling",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
    }
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
POSTS = GENERATE | POOLING | COMPUTE


@dataclass(frozen=True, slots=True)
class ServedApp:
    """A model that is offered: vLLM's application, its entries in `/v1/models` by name, its aliases after it, the
    OpenAPI document of all that the application has, those of the paths for POST that it serves, whether messages may
    have images, how many tokens a list of them may have, and which version of the model it is."""

    app: App
    cards: Mapping[str, object]
    openapi: Callable[[], dict[str, Any]] = dict
    posts: frozenset[str] = POSTS
    sees_images: bool = False
    most_tokens: int = sys.maxsize
    model: str = ""
