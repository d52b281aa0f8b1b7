"""How many requests a body asks of the engines: prompts, conversations, texts or pairs of them, times choices.

This is the one place that counts them, route by route. What is none of them counts as one, and vLLM says what is wrong
with it.
"""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec

from muxserve.gateway.http.body import RequestFields
from muxserve.gateway.http.errors import RequestError
from muxserve.gateway.http.served_app import POOLING

COMPLETIONS = frozenset({"/v1/completions", "/v1/completions/render"})
CHATS = frozenset({"/v1/chat/completions", "/v1/chat/completions/render"})
BATCHES = frozenset({"/v1/chat/completions/batch"})
# Pairs of texts: each is a request to a model that reads both at once, and each text is one to a model of embeddings.
PAIRS = frozenset({"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"})
SEVERAL = COMPLETIONS | CHATS | BATCHES | POOLING


def engine_requests(path: str, fields: RequestFields, reads_pairs: bool = False) -> int:
    """How many requests the route `path` makes of a body; at least 1, as of routes that have one answer.

    Args:
        fields: those of the body.
        reads_pairs: the model takes two texts in one request.
    """
    if path not in SEVERAL:
        return 1
    if path in COMPLETIONS:
        # vLLM serves prompts and embeddings of prompts together.
        prompts = _length(fields.prompt, b'"[') + _length(fields.prompt_embeds, b'"')
        return max(1, prompts) * _choices(fields.n)
    if path in CHATS:
        return _choices(fields.n)
    if path in BATCHES:
        return max(1, _length(fields.messages, b"[{")) * _choices(fields.n)
    if path in PAIRS:
        left = max(_length(each, b'"{') for each in (fields.query, fields.queries, fields.data_1, fields.text_1))
        right = max(_length(each, b'"{') for each in (fields.documents, fields.items, fields.data_2, fields.text_2))
        return max(1, left, right) if reads_pairs else max(1, left + right)
    # A list of objects is one conversation, except in `inputs`.
    conversations = max(_length(each, b'"[') for each in (fields.messages, fields.input))
    return max(1, conversations, *(_length(each, b'"{[') for each in (fields.texts, fields.images, fields.inputs)))


def check_engine_requests(asked: int, most: int, model: str) -> None:
    """Refuse a body that asks for more than one request may take of what a model has in service and waiting.

    Raises:
        RequestError: `asked` is more than `most` (400).
    """
    if asked > most:
        raise RequestError(
            HTTPStatus.BAD_REQUEST,
            f"this request asks for {asked} answers (prompts, conversations or texts, times `n`), and one request for "
            f"model {model} may ask for {most}, a part of its limits.max_concurrency and limits.max_queue; send "
            "several smaller requests",
        )


def _length(value: msgspec.Raw, begins: bytes) -> int:
    """How many requests are in a field: as many as a list has elements that begin with one of these characters;
    otherwise it is one text, or the tokens of one. 0 if the field is missing."""
    text = bytes(value).lstrip()
    if not text or text == b"null":
        return 0
    if text[:1] != b"[" or text[1:].lstrip()[:1] not in begins:
        return 1
    return len(msgspec.json.decode(text, type=list[msgspec.Raw]))


def _choices(value: msgspec.Raw) -> int:
    """`n` as vLLM's request classes read it: numbers with a fraction of 0, texts of numbers, and true are numbers."""
    if not bytes(value):
        return 1
    try:
        given = msgspec.json.decode(value)
        number = float(given) if isinstance(given, int | float | str) else 1.0
    except (msgspec.DecodeError, ValueError, OverflowError):
        return 1
    return max(1, int(number)) if math.isfinite(number) else 1
