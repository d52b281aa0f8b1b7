"""A fleet that grows and shrinks by itself: a model sleeps, requests wake it, and it has the answers of stock vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.fleet import fleet_file, running
from tests.e2e.load import stream_chat
from tests.e2e.reference import requests_for


async def test_a_sleeping_model_is_woken_by_requests(
    tmp_path_factory: pytest.TempPathFactory, reference: dict[str, Any]
) -> None:
    path = fleet_file(
        tmp_path_factory.mktemp("scaling"), {"replicas": {"min": 0, "max": 1, "idle": "2s"}}, gateway={"count": 2}
    )
    with running(path) as fleet:

        def states() -> set[str]:
            return {model["status"] for model in fleet.get("/health").json()["models"].values()}

        def empty() -> bool:
            """Units that serve nothing end, and their pools go."""
            return states() == {"asleep"} and fleet.part("muxserve-memory-manager") is None

        await asyncio.to_thread(fleet.wait, empty, 60, "asleep")
        for _ in range(2):
            requests = requests_for("atlas")[:6]
            answers = await asyncio.gather(*(stream_chat(fleet.async_client(), "atlas", each) for each in requests))
            assert answers == reference["atlas"][:6]
            assert fleet.get("/health").json()["models"]["frontdesk"]["status"] == "asleep"
            await asyncio.to_thread(fleet.wait, empty, 60, "asleep again")
