"""A model as the endpoint offers it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from muxserve.gateway.http.errors import App
from muxserve.gateway.http.paths import POSTS


@dataclass(frozen=True, slots=True)
class ServedApp:
    """A model that is offered: vLLM's application, its entries in `/v1/models` by name, its aliases after it, the
    OpenAPI document of all that the application has, those of the paths for POST that it serves, whether messages may
    have images, and how many tokens a list of them may have."""

    app: App
    cards: Mapping[str, object]
    openapi: Callable[[], dict[str, Any]] = dict
    posts: frozenset[str] = POSTS
    sees_images: bool = False
    most_tokens: int = sys.maxsize
