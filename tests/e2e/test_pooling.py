"""Models that answer with vectors, in one fleet with one that generates: the vectors are those of stock vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from muxserve.cluster.machine import this_machine
from tests.e2e.fleet import Fleet
from tests.e2e.mixed_reference import DOCUMENTS, GENERATING, KINDS, MAX_LEN, QUERY, SEEING, TEXTS
from tests.support.patience import PATIENCE

# A step holds more than one of these, so that they wait for each other.
MANY = 120


@pytest.fixture(scope="module")
def pooled(stock_of_mixed: dict[str, Any]) -> dict[str, Any]:
    """What stock vLLM makes of the texts, by model."""
    return stock_of_mixed


@pytest.fixture(scope="module")
def fleet(mixed: Fleet) -> Fleet:
    return mixed


def same(found: Any, expected: Any) -> bool:
    """Whether these are the same floats. Without AVX-512 vLLM has other kernels, and last digits differ."""
    return found == expected if this_machine().avx512 else np.allclose(found, expected, rtol=0, atol=1e-6)


def post(fleet: Fleet, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{fleet.url}{path}", json=body, timeout=PATIENCE, verify=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("model", ["embedder", "encoder"])
def test_embeddings_with_the_official_client(fleet: Fleet, pooled: dict[str, Any], model: str) -> None:
    for text, expected in zip(TEXTS, pooled[model]["data"], strict=True):
        answer = fleet.client.embeddings.create(model=model, input=text)
        assert same(answer.data[0].embedding, expected)
    # When several run at once, their floats depend on what else is in the step, by rounding.
    answer = fleet.client.embeddings.create(model=model, input=TEXTS)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    for each, expected in zip(answer.data, pooled[model]["data"], strict=True):
        assert each.embedding == pytest.approx(expected, abs=1e-5)
    assert answer.usage.prompt_tokens >= sum(map(len, TEXTS))


@pytest.mark.serves("Bert (vectors)", "served")
@pytest.mark.serves("Qwen3 (vectors)", "served")
@pytest.mark.parametrize("model", list(KINDS))
def test_what_is_pooled(fleet: Fleet, pooled: dict[str, Any], model: str) -> None:
    for text, expected in zip(TEXTS, pooled[model]["data"], strict=True):
        assert same(post(fleet, "/pooling", model=model, input=text)["data"][0]["data"], expected)


@pytest.mark.parametrize("model", ["judge", "reranker"])
def test_classes(fleet: Fleet, pooled: dict[str, Any], model: str) -> None:
    for text, expected in zip(TEXTS, pooled[model]["data"], strict=True):
        assert same(post(fleet, "/classify", model=model, input=text)["data"][0]["probs"], expected)


@pytest.mark.parametrize("model", ["embedder", "tokens", "encoder", "reranker"])
def test_scores_and_ranks(fleet: Fleet, pooled: dict[str, Any], model: str) -> None:
    expected = pooled[model]["score"]
    for path in ("/score", "/v1/score"):
        for document, score in zip(DOCUMENTS, expected, strict=True):
            answer = post(fleet, path, model=model, queries=QUERY, documents=document)
            assert answer["data"][0]["score"] == pytest.approx(score, abs=1e-6)
    ranked = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = post(fleet, path, model=model, query=QUERY, documents=DOCUMENTS)
        assert [each["index"] for each in answer["results"]] == ranked
        for each in answer["results"]:
            assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-5)


def test_a_model_serves_what_it_is_for_and_says_so(fleet: Fleet) -> None:
    with pytest.raises(
        openai.NotFoundError, match=r"'encoder' does not serve /v1/chat/completions; it has .*embeddings"
    ):
        fleet.client.chat.completions.create(model="encoder", messages=[{"role": "user", "content": "Hello!"}])
    with pytest.raises(openai.NotFoundError, match=r"'arithmetic' does not serve /v1/embeddings; it has .*completions"):
        fleet.client.embeddings.create(model="arithmetic", input="Hello!")
    with pytest.raises(openai.BadRequestError, match="512"):
        fleet.client.embeddings.create(model="encoder", input="long " * MAX_LEN)


def test_a_model_that_keeps_no_kv_has_no_pages(fleet: Fleet) -> None:
    (stats,) = fleet.memory()
    assert {model["name"]: model["quota_pages"] for model in stats["models"] if not model["quota_pages"]} == {
        "encoder": 0,
        "reranker": 0,
    }
    (unit,) = fleet.get("/fleet").json()["units"]
    models = unit["state"]["models"]
    assert [name for name, model in models.items() if not model["pages_per_block"]] == [
        "encoder",
        "reranker",
    ]
    assert {
        name.rsplit("/", 1)[1] for name in unit["state"]["engines"] if not name.startswith((GENERATING, SEEING))
    } == {"prefill"}
    fleet.wait_pages_free()


@pytest.mark.parametrize("model", ["embedder", "encoder"])
def test_nothing_is_lost_when_the_engine_is_killed(fleet: Fleet, pooled: dict[str, Any], model: str) -> None:
    expected = pooled[model]["data"]

    async def load() -> None:
        client = fleet.async_client()

        async def ask(number: int) -> tuple[int, list[float]]:
            text = TEXTS[number % len(TEXTS)]
            answer = await client.embeddings.create(model=model, input=text)
            return number, answer.data[0].embedding

        asked = [asyncio.ensure_future(ask(number)) for number in range(MANY)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        fleet.kill(f"{model}/prefill")
        for number, embedding in await asyncio.gather(*asked):
            assert embedding == pytest.approx(expected[number % len(TEXTS)], abs=1e-5)
        await client.close()

    asyncio.run(load())
    fleet.wait_healthy()
    fleet.wait_pages_free()
