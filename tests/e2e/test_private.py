"""A model with a cache of vLLM's own beside models on the pool of the same unit: the same tokens as stock vLLM's,
through deaths, and through sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.fleet import ROOT, START_SECONDS, Fleet, fleet_file, running
from tests.e2e.load import Load, ask_each, stream_chat, until
from tests.e2e.mixed_reference import (
    CHUNK,
    GENERATING,
    KINDS,
    MAX_LEN,
    OPTIONS,
    PROMPTS,
    SEEING,
    SEEING_ALONE,
    SEES,
    TEXTS,
    adapter,
    checkpoint,
    messages,
)
from tests.e2e.reference import requests_for
from tests.e2e.test_adapters import answers
from tests.e2e.test_images import params
from tests.e2e.test_pooling import post, same
from tests.support import preloaded
from tests.support.patience import PATIENCE
from tests.support.thoroughness import cases
from tests.support.tiny_private import tiny_private

OWN, POOLED = "arithmetic", "frontdesk"
# What is killed, by words of its command line.
PARTS = {
    "engine": ("engine", f"{OWN}/both"),
    "unit scheduler": ("muxserve.unit.scheduler",),
    "memory manager": ("muxserve-memory-manager",),
    "model parent": ("muxserve model", OWN),
}
COUNT = 24


def both(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """What `/fleet` says of the models."""
    return {model["name"]: model for model in fleet.get("/fleet").json()["models"]}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    changes = {OWN: {"kv": "private"}}
    path = fleet_file(tmp_path_factory.mktemp("private"), changes_of=changes, without=["atlas"])
    with running(path, start=preloaded.start) as deployed:
        yield deployed


async def test_both_answer_as_stock_vllm_does(fleet: Fleet, reference: dict[str, Any]) -> None:
    assert not (await ask_each(fleet, reference, [OWN, POOLED])).wrong
    told = both(fleet)
    assert (told[OWN]["kv"], told[POOLED]["kv"]) == ("private", "pool")
    assert told[OWN]["kv_bytes"] > 0
    (unit,) = fleet.get("/fleet").json()["units"]
    assert set(unit["state"]["engines"]) == {f"{OWN}/both", f"{POOLED}/prefill", f"{POOLED}/decode"}
    assert unit["state"]["models"][OWN]["returned"] == 0


@pytest.mark.parametrize("part", cases(PARTS, ["engine"]))
async def test_streams_survive_a_death(fleet: Fleet, reference: dict[str, Any], part: str) -> None:
    async with Load(fleet, reference, [OWN, POOLED], COUNT) as busy:
        await busy.until(lambda: _decoding(fleet) > 2, "decoding")
        killed = fleet.kill(*PARTS[part])
        busy.enough()
    assert not busy.wrong

    def again() -> bool:
        there = fleet.part(*PARTS[part])
        return there is not None and there.pid != killed

    await until(again, f"there again: {part}", START_SECONDS)
    await until(lambda: fleet.get("/health").json()["status"] == "ok", "whole", START_SECONDS)
    assert not (await ask_each(fleet, reference, [OWN, POOLED], 4)).wrong


def _decoding(fleet: Fleet, model: str = OWN) -> int:
    (unit,) = fleet.get("/fleet").json()["units"]
    state = unit["state"]
    return state["models"][model]["decoding"] if state else 0


@pytest.mark.thorough
async def test_it_sleeps_and_wakes(tmp_path: Path, reference: dict[str, Any]) -> None:
    """Only one of two models has room at a time, so that each request wakes one."""
    path = fleet_file(
        tmp_path,
        {"replicas": {"max": 1, "wake": 4 * PATIENCE}},
        {OWN: {"kv": "private"}},
        without=["atlas"],
        memory={"limit": 1400 << 20, "min_residence": "200ms"},
        kv_pool={"size": "64MiB"},
    )
    with running(path, start=preloaded.start) as deployed:
        for _ in range(2):
            for model in (OWN, POOLED):
                assert not (await ask_each(deployed, reference, [model], 4, 4)).wrong
        wakes = deployed.get("/fleet").json()["memory"]["models"][OWN]["wakes"]
        assert wakes > 0


@pytest.mark.thorough
def test_what_the_pool_cannot_hold_is_served_and_said(tmp_path: Path) -> None:
    path = fleet_file(tmp_path, without=["atlas", OWN])
    declared = yaml.safe_load(path.read_text())
    declared["models"].append({"name": "chunked", "path": str(tiny_private("llama4")), "dtype": "float32"})
    path.write_text(yaml.safe_dump(declared))
    with running(path, start=preloaded.start) as deployed:
        answer = deployed.client.completions.create(model="chunked", prompt="What is 12 + 7?", max_tokens=20)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        shown = deployed.command("validate", str(path))
        assert "it uses chunked attention" in " ".join(shown.stdout.split())
        assert both(deployed)["chunked"]["kv"] == "private"


@pytest.mark.thorough
async def test_a_draft_model(tmp_path: Path, reference: dict[str, Any]) -> None:
    """One model takes another one's proposals, beside one that does not; an engine of each dies."""
    proposing = {"method": "draft_model", "model": str(ROOT / "configs/models" / OWN), "num_speculative_tokens": 2}
    changes: dict[str, dict[str, Any]] = {
        OWN: {"kv": "private", "engine_args": {"speculative_config": proposing}},
        POOLED: {"kv": "private"},
    }
    path = fleet_file(tmp_path, changes_of=changes, without=["atlas"])
    # What a seed draws depends on what was proposed.
    greedy = {
        model: [index for index, each in enumerate(requests_for(model)[:COUNT]) if each["temperature"] == 0]
        for model in changes
    }
    with running(path, start=preloaded.start) as deployed:
        assert {model["kv"] for model in both(deployed).values()} == {"private"}
        async with deployed.async_client() as client:
            for victim in ("", *(f"{model}/both" for model in changes)):
                asked = {
                    (model, index): asyncio.ensure_future(stream_chat(client, model, requests_for(model)[index]))
                    for model, chosen in greedy.items()
                    for index in chosen
                }
                if victim:
                    await until(lambda: min(_decoding(deployed, model) for model in changes) > 0, "decoding")
                    deployed.kill("engine", victim)
                for (model, index), answer in asked.items():
                    assert await answer == reference[model][index], (victim, model, index)
                await asyncio.to_thread(deployed.wait_healthy)


# Those that keep KV while they compute.
VECTORS = ("embedder", "tokens", "judge")
ADAPTED = ("", "one", "two")


@pytest.fixture(scope="module")
def various(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Models that answer with vectors, one with adapters, and two that see images, each with a cache of its own."""
    common = {
        "kv": "private",
        "max_len": MAX_LEN,
        "max_num_batched_tokens": CHUNK,
        "dtype": "float32",
        "threads": 1,
        "limits": {"max_wait": "none"},
    }
    models: list[dict[str, Any]] = [
        {"name": name, "path": str(checkpoint(name)), "engine_args": OPTIONS.get(name, {})} for name in VECTORS
    ]
    adapters = {name: str(adapter(name)) for name in ADAPTED if name}
    models.append({"name": GENERATING, "path": str(ROOT / "configs/models" / GENERATING), "adapters": adapters})
    for name, make in SEES.items():
        models.append({"name": name, "path": str(make()), "engine_args": {"limit_mm_per_prompt": {"image": 2}}})
    path = fleet_file(tmp_path_factory.mktemp("various"), models=[common | model for model in models])
    with running(path, start=preloaded.start) as deployed:
        yield deployed


@pytest.mark.thorough
@pytest.mark.parametrize("model", VECTORS)
def test_vectors(various: Fleet, stock_of_mixed: dict[str, Any], model: str) -> None:
    assert model in KINDS
    assert both(various)[model]["kv"] == "private"
    for killed in (False, True):
        if killed:
            various.kill(f"{model}/prefill")
        for text, expected in zip(TEXTS, stock_of_mixed[model]["data"], strict=True):
            assert same(post(various, "/pooling", model=model, input=text)["data"][0]["data"], expected)
    various.wait_healthy()


@pytest.mark.thorough
async def test_adapters(various: Fleet, stock_of_mixed: dict[str, Any]) -> None:
    expected = {name: stock_of_mixed[GENERATING][name] for name in ADAPTED}
    assert len(expected["one"]) == len(PROMPTS)
    for killed in (False, True):
        asked = asyncio.ensure_future(answers(various, ADAPTED))
        if killed:
            await until(lambda: _decoding(various, GENERATING) > 0, "decoding")
            various.kill(f"{GENERATING}/both")
        assert await asked == expected
    await asyncio.to_thread(various.wait_healthy)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(SEEING, marks=pytest.mark.serves("Idefics3 (with images)", "served")),
        pytest.param(SEEING_ALONE, marks=pytest.mark.serves("Aria (with images, private)", "served")),
    ],
)
async def test_images(various: Fleet, stock_of_mixed: dict[str, Any], model: str) -> None:
    expected: list[str] = stock_of_mixed[model]["texts"]
    assert len(set(expected)) == len(expected), "else nothing is seen"
    async with various.async_client() as client:

        async def ask(index: int) -> str | None:
            asked: Any = messages(index)
            made = await client.chat.completions.create(model=model, messages=asked, **params(index))
            return made.choices[0].message.content

        assert [await ask(index) for index in range(len(expected))] == expected
        asked = [asyncio.ensure_future(ask(index)) for index in range(len(expected)) for _ in range(4)]
        await until(lambda: _decoding(various, model) > 0, "decoding")
        various.kill(f"{model}/both")
        assert await asyncio.gather(*asked) == [text for text in expected for _ in range(4)]
    await asyncio.to_thread(various.wait_healthy)
