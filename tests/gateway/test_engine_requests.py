"""What a body asks of the engines is counted, on every route and however it is written."""

from __future__ import annotations

import json

import pytest

from muxserve.gateway.http.body import asked_by
from muxserve.gateway.http.errors import RequestError
from muxserve.gateway.http.served_app import GENERATE, POSTS
from muxserve.gateway.limits.engine_requests import check_engine_requests, engine_requests

COMPLETIONS, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"
TALK = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("{}", 1),
        ('{"prompt": "x"}', 1),
        ('{"prompt": [1, 2, 3]}', 1),
        ('{"prompt": ["a", "b"]}', 2),
        ('{"prompt": [ [1, 2], [3] ], "n": 3}', 6),
        ('{"prompt": [], "n": 2}', 2),
        ('{"prompt": {"a": 1}, "n": "many"}', 1),
        ('{"prompt": ["a", "b"], "prompt_embeds": ["c", "d", "e"]}', 5),
        ('{"prompt": null, "prompt_embeds": "c"}', 1),
        # As pydantic reads a number.
        ('{"n": 128}', 128),
        ('{"n": "128"}', 128),
        ('{"n": " 128 "}', 128),
        ('{"n": "1_28"}', 128),
        ('{"n": 1e2}', 100),
        ('{"n": 128.0}', 128),
        ('{"n": "128.0"}', 128),
        ('{"n": true}', 1),
        ('{"n": 99999}', 99999),
        ('{"n": 1, "n": 128}', 128),
        ('{"\\u006e": 128}', 128),
        ('{"prompt": ["a", "b"], "n": 128, "use_beam_search": true}', 256),
        # vLLM says what is wrong with these.
        ('{"n": null}', 1),
        ('{"n": 0}', 1),
        ('{"n": -1}', 1),
        ('{"n": [128]}', 1),
        ('{"n": 1e999}', 1),
        ('{"n": "1e999"}', 1),
    ],
)
def test_prompts_and_choices(body: str, count: int) -> None:
    assert engine_requests(COMPLETIONS, asked_by(body.encode())) == count


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        (CHAT, {"messages": TALK * 20, "n": "4"}, 4),
        (BATCH, {"messages": [TALK] * 20}, 20),
        (BATCH, {"messages": [TALK] * 20, "n": 2}, 40),
        (BATCH, {"messages": "x"}, 1),
        ("/v1/completions/render", {"prompt": ["a"] * 9}, 9),
        ("/v1/chat/completions/render", {"messages": TALK, "n": 3}, 3),
        # These have one answer, whatever else stands in the body.
        ("/v1/responses", {"input": TALK * 3, "n": 5, "prompt": ["a", "b"]}, 1),
        ("/v1/messages", {"messages": TALK * 3, "n": 5}, 1),
        ("/tokenize", {"messages": TALK * 3, "n": 5}, 1),
        ("/v1/embeddings", {"input": "x"}, 1),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 1),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3),
        ("/v1/embeddings", {"input": [[1, 2], [3]]}, 2),
        ("/v1/embeddings", {"input": TALK * 4}, 1),
        ("/v1/embeddings", {"input": [TALK, TALK, TALK]}, 3),
        ("/v1/embeddings", {"messages": TALK * 4}, 1),
        ("/v1/embeddings", {"messages": [TALK, TALK]}, 2),
        ("/v2/embed", {"texts": ["a", "b", "c"]}, 3),
        ("/v2/embed", {"inputs": [{"content": []}, {"content": []}]}, 2),
        ("/v2/embed", {"images": ["data:", "data:"]}, 2),
        ("/pooling", {"input": ["a", "b"], "n": 7}, 2),
        ("/classify", {"input": ["a"] * 5}, 5),
    ],
)
def test_each_route(path: str, body: dict[str, object], count: int) -> None:
    assert engine_requests(path, asked_by(json.dumps(body).encode())) == count


@pytest.mark.parametrize(
    ("path", "body", "pairs", "texts"),
    [
        ("/score", {"text_1": "a", "text_2": ["b"] * 5}, 5, 6),
        ("/v1/score", {"data_1": ["a"] * 5, "data_2": ["b"] * 5}, 5, 10),
        ("/score", {"queries": "a", "documents": ["b", "c"]}, 2, 3),
        ("/score", {"queries": ["a", "b"], "items": ["b", "c"]}, 2, 4),
        ("/rerank", {"query": "a", "documents": ["b"] * 9}, 9, 10),
        ("/v2/rerank", {"query": {"content": []}, "documents": [{"content": []}] * 3}, 3, 4),
        ("/v1/rerank", {"query": "a", "documents": "b"}, 1, 2),
        ("/v1/rerank", {}, 1, 1),
    ],
)
def test_pairs_are_one_request_or_two(path: str, body: dict[str, object], pairs: int, texts: int) -> None:
    content = json.dumps(body).encode()
    assert engine_requests(path, asked_by(content), reads_pairs=True) == pairs
    assert engine_requests(path, asked_by(content)) == texts


def test_every_route_counts_at_least_one() -> None:
    assert {engine_requests(path, asked_by(b"{}")) for path in POSTS} == {1}
    assert BATCH in GENERATE


def test_more_than_one_request_may_ask_for_is_refused_with_the_reason() -> None:
    check_engine_requests(1024, 1024, "m")
    with pytest.raises(
        RequestError, match=r"asks for 2560 answers .* may ask for 1024, a part of its limits"
    ) as caught:
        check_engine_requests(2560, 1024, "m")
    assert caught.value.status == 400
