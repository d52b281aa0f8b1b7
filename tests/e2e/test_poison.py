"""Requests that make their engine fail: they end with an error, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.fleet import QUICKSTART, START_SECONDS, Fleet, fleet_file, running
from tests.e2e.load import Load, stream_chat, until
from tests.e2e.reference import requests_for
from tests.support import poison, preloaded
from tests.support.patience import PATIENCE
from tests.support.thoroughness import cases

MODEL, OTHER = "arithmetic", "frontdesk"


# What engines the poisoned model has: one of both phases, beside one with two, or two.
SHAPES = ("split", "one")


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(shape: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two models. The first has a logits processor that fails when asked to; the other's files are in a directory of
    their own, so that they can be taken away."""
    directory = tmp_path_factory.mktemp("poison")
    shutil.copytree(QUICKSTART.parent / "models" / OTHER, directory / OTHER)
    path = fleet_file(
        directory,
        changes_of={
            MODEL: {"engines": shape, "engine_args": {"logits_processors": [poison.NAME]}},
            OTHER: {"path": str(directory / OTHER)},
        },
        without=("atlas",),
    )
    with running(path, start=preloaded.start) as deployed:
        yield deployed


def engines(fleet: Fleet) -> dict[str, int]:
    found = fleet.get("/fleet").json()["unit"]["state"]["engines"]
    return {name: engine["pid"] for name, engine in found.items()}


def culprits(fleet: Fleet) -> int:
    count: int = fleet.get("/fleet").json()["unit"]["state"]["models"][MODEL]["culprits"]
    return count


def poisoned(way: str, at: int = 3) -> dict[str, Any]:
    request = {**requests_for(MODEL)[1]}
    request["extra_body"] = {**request.get("extra_body", {}), "vllm_xargs": {"poison": way, "poison_at": at}}
    return {**request, "max_tokens": 40}


async def whole(client: openai.AsyncOpenAI, way: str) -> openai.APIStatusError:
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model=MODEL, **poisoned(way))
    return caught.value


async def streamed(client: openai.AsyncOpenAI, way: str) -> openai.APIError:
    with pytest.raises(openai.APIError) as caught:
        await stream_chat(client, MODEL, poisoned(way))
    return caught.value


async def good(client: openai.AsyncOpenAI, reference: dict[str, Any], model: str, count: int) -> None:
    """Streams beside one another, all as stock vLLM has them."""
    answers = await asyncio.gather(*(stream_chat(client, model, each) for each in requests_for(model)[:count]))
    assert answers == reference[model][:count]


@pytest.mark.parametrize("way", cases(["raise", "abort"], ["raise"]))
async def test_the_culprit_ends_with_an_error_and_all_others_with_their_answers(
    fleet: Fleet, reference: dict[str, Any], way: str
) -> None:
    client, before, known = fleet.async_client(), engines(fleet), culprits(fleet)
    why = poison.WORDS if way == "raise" else "SIGABRT"
    errors = asyncio.gather(whole(client, way), streamed(client, way))
    await asyncio.gather(good(client, reference, MODEL, 32), good(client, reference, OTHER, 8))
    answer, stream = await errors
    assert answer.status_code == 500
    assert why in answer.message
    assert "alone" in answer.message
    assert why in stream.message
    await asyncio.to_thread(fleet.wait_healthy)
    after = engines(fleet)
    changed = {name for name in before if before[name] != after[name]}
    # What raises costs nobody's engine; what crashes only those of its own model.
    assert changed <= (set() if way == "raise" else {name for name in before if name.startswith(f"{MODEL}/")})
    await until(lambda: culprits(fleet) == known + 2, "counted")
    await asyncio.to_thread(fleet.wait_pages_free)


@pytest.mark.thorough
async def test_poison_over_and_over_ends_nothing(fleet: Fleet, reference: dict[str, Any]) -> None:
    client, before = fleet.async_client(), engines(fleet)
    load = asyncio.create_task(good(client, reference, MODEL, 16))
    for _ in range(4):
        errors = await asyncio.gather(whole(client, "raise"), whole(client, "raise"), whole(client, "abort"))
        assert all(error.status_code == 500 for error in errors)
    await load
    await good(client, reference, OTHER, 4)
    assert {name: pid for name, pid in engines(fleet).items() if name.startswith(OTHER)} == {
        name: pid for name, pid in before.items() if name.startswith(OTHER)
    }
    await asyncio.to_thread(fleet.wait_pages_free)


@pytest.mark.thorough
async def test_one_that_is_killed_with_its_engine_is_not_condemned(
    fleet: Fleet, reference: dict[str, Any], shape: str
) -> None:
    known, killed = culprits(fleet), set[int]()

    def struck() -> bool:
        """An engine with requests, each once."""
        state = fleet.get("/fleet").json()["unit"]["state"]["engines"]
        engine = state[f"{MODEL}/{'both' if shape == 'one' else 'decode'}"]
        if engine["up"] and engine["requests"] and engine["pid"] not in killed:
            os.kill(engine["pid"], signal.SIGKILL)
            killed.add(engine["pid"])
            return True
        return False

    async with Load(fleet, reference, [MODEL], 32) as load:
        for _ in range(4):
            await load.until(struck, "back", START_SECONDS)
    assert not load.wrong
    assert culprits(fleet) == known
    await asyncio.to_thread(fleet.wait_healthy)


async def test_a_model_that_cannot_be_started_is_degraded_and_comes_back(
    fleet: Fleet, reference: dict[str, Any], tmp_path: Path
) -> None:
    files = fleet.directory / OTHER
    files.rename(files.with_suffix(".gone"))
    fleet.kill("muxserve model", OTHER)

    found: list[dict[str, Any]] = []

    def degraded() -> bool:
        found.append(fleet.get("/health").json())
        return bool(found[-1]["models"][OTHER]["status"] == "degraded")

    await until(degraded, "degraded", START_SECONDS)
    assert f"engine {OTHER}/" in found[-1]["models"][OTHER]["reason"]
    assert found[-1]["status"] == "degraded"
    body = {"model": OTHER, "prompt": "hello", "max_tokens": 4}
    async with httpx.AsyncClient(verify=False, timeout=PATIENCE) as http:
        refused = await http.post(f"{fleet.url}/v1/completions", json=body)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "cannot start" in refused.json()["error"]["message"]
    metric = f'muxserve_model_degraded{{model_name="{OTHER}",unit="u0"}} 1.0'
    await until(lambda: metric in fleet.get("/metrics").text, "in the metrics")
    await good(fleet.async_client(), reference, MODEL, 4)
    files.with_suffix(".gone").rename(files)
    await until(lambda: fleet.get("/health").json()["models"][OTHER]["status"] == "up", "up again", START_SECONDS)
    await good(fleet.async_client(), reference, OTHER, 4)
