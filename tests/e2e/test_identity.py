"""Over 200 requests to three models through HTTP come out token by token as from stock vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.fleet import fleet_file, running
from tests.e2e.load import ask_each, stream_chat
from tests.e2e.reference import requests_for
from tests.support import preloaded
from tests.support.thoroughness import THOROUGH, cases

ROUNDS = 4 if THOROUGH else 2
TIGHT = "chunked prefill in a tight pool"
MIX, ONE = "a tight pool of models with one engine and with two", "a tight pool of models with one engine"
IN_CHUNKS = {"max_len": 320, "max_num_batched_tokens": 64}
A_MIX: dict[str, Any] = {
    "model_changes": IN_CHUNKS,
    "changes_of": {name: {"engines": "one"} for name in ("arithmetic", "frontdesk")},
    "kv_pool": {"size": "6MiB"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    # Each model's quota holds two or three of the longer requests, so decode engines preempt.
    TIGHT: {
        "model_changes": IN_CHUNKS,
        "kv_pool": {"size": "6MiB"},
    },
    MIX: A_MIX,
    ONE: {"model_changes": {**IN_CHUNKS, "engines": "one"}, "kv_pool": {"size": "6MiB"}},
    **{f"{MIX}, under {policy}": {**A_MIX, "policy": policy} for policy in ("adbs", "fcfs")},
    "models with one engine that no lease is withheld from": {"model_changes": {"engines": "one"}, "policy": "free"},
    # When thorough. One of them compiled: that takes a quarter of a minute of two cores for each.
    "no prefix caching, one model compiled": {
        "model_changes": {"prefix_caching": False},
        "changes_of": {"frontdesk": {"engine_args": {"enforce_eager": False}}},
    },
}


@pytest.mark.serves("Llama", "served", "prefix cache")
@pytest.mark.serves("Qwen3", "served", "prefix cache")
@pytest.mark.parametrize("name", cases(SETTINGS, [TIGHT, MIX]))
async def test_answers_are_those_of_stock_vllm(name: str, tmp_path: Path, reference: dict[str, Any]) -> None:
    with running(fleet_file(tmp_path, **SETTINGS[name]), start=preloaded.start) as fleet:
        # On a machine that has much else to do, few requests may be in the pool at once.
        for _ in range(ROUNDS):
            asked = await ask_each(fleet, reference)
            assert len(asked.answers) >= 200
            assert not asked.wrong
            models = fleet.get("/fleet").json()["unit"]["state"]["models"]
            tight = sum(model["returned"] for model in models.values()) > 0
            if tight or "tight" not in name:
                break
        assert tight or "tight" not in name, "the pool was not tight"
        # Whatever crossed on its way, no engine was thought to have lost or kept what it had not.
        assert not any(model["missing"] or model["strays"] for model in models.values())
        hits = sum(model["hits"] for stats in fleet.memory() for model in stats["models"])
        assert (hits == 0) == ("no prefix caching" in name)
        fleet.wait_pages_free()


@pytest.mark.thorough
async def test_ten_models_with_one_engine_each(tmp_path: Path, reference: dict[str, Any]) -> None:
    """In one unit, all asked at once."""
    model = "arithmetic"
    path = fleet_file(tmp_path, {"engines": "one", "max_len": 512}, without=["atlas", "frontdesk"])
    declared = yaml.safe_load(path.read_text())
    names = [f"{model}-{number}" for number in range(10)]
    declared["models"] = [{**declared["models"][0], "name": name} for name in names]
    path.write_text(yaml.safe_dump(declared))
    asked, wanted = requests_for(model)[:6], reference[model][:6]
    with running(path, start=preloaded.start) as fleet:
        async with fleet.async_client() as client:
            answers = [asyncio.gather(*(stream_chat(client, name, each) for each in asked)) for name in names]
            assert await asyncio.gather(*answers) == [wanted] * len(names)
        assert set(fleet.get("/fleet").json()["unit"]["state"]["engines"]) == {f"{name}/both" for name in names}
        await asyncio.to_thread(fleet.wait_pages_free)
