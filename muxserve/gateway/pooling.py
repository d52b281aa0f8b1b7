"""The routes of models that answer with vectors: embeddings, classes, scores, rankings.

They are vLLM's own. A model has those of its task: an embedding model has `/v1/embeddings`, a classifier `/classify`,
and what can compare two texts has the routes for scores and rankings.
"""

from __future__ import annotations

import msgspec

# Served under the model's limits, as generation is.
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


class _Texts(msgspec.Struct):
    """The fields that hold what is pooled, whatever the route calls it."""

    input: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()
    inputs: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    data_1: msgspec.Raw = msgspec.Raw()
    data_2: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()
    items: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Texts)
_LISTS = (b'"', b"[", b"{")


def prompts_of(body: bytes) -> int:
    """How many prompts a JSON body with an object brings to a route of `POOLING`: as many as its longest list has
    texts. What holds none counts as one; vLLM says what is wrong with it."""
    texts = _decoder.decode(body)
    return max(1, *(_count(bytes(getattr(texts, name))) for name in _Texts.__struct_fields__))


def _count(text: bytes) -> int:
    text = text.lstrip()
    if text[:1] != b"[" or not text[1:].lstrip().startswith(_LISTS):  # otherwise a text, or the tokens of one
        return 1
    return len(msgspec.json.decode(text, type=list[msgspec.Raw]))
