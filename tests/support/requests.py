"""Requests as a gateway gives them, from the fields that a test is about."""

from typing import Any

from muxserve.replicas.priorities import ServiceClass
from muxserve.wire import RequestSpec


def asking(
    model: str = "m",
    prompt_tokens: int = 20,
    max_tokens: int = 50,
    body: bytes = b"",
    traced: bool = False,
    **service: Any,
) -> RequestSpec:
    """What a request asks for; further keywords say how it is served among others."""
    return RequestSpec(model, body, prompt_tokens, max_tokens, ServiceClass(**service), traced)


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """Take these out of `fields`; returns those that were there."""
    return {name: fields.pop(name) for name in names if name in fields}


# The fields of `asking`.
ASKED = ("model", "prompt_tokens", "max_tokens", "body", "traced", *ServiceClass.__struct_fields__)
