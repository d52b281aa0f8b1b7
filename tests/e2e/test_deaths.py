"""kill -9 of each part during 32 concurrent streams: every request still completes with the right tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.load import all_requests, differences, stream_chat
from tests.e2e.reference import requests_for
from tests.support.patience import PATIENCE


@pytest.fixture(scope="module")
def fleet(quickstart: Fleet) -> Fleet:
    return quickstart


PARTS = {
    "prefill engine": ("engine", "atlas/prefill"),
    "decode engine": ("engine", "arithmetic/decode"),
    "another decode engine": ("engine", "frontdesk/decode"),
    "model parent": ("muxserve model", "arithmetic"),
    "unit scheduler": ("muxserve.unit.scheduler",),
    "memory manager": ("muxserve-memory-manager",),
    "warm parent": ("muxserve warm parent",),
    "vLLM": ("muxserve.engine.machine_parent",),
}


@pytest.mark.parametrize("part", PARTS)
async def test_streams_survive(fleet: Fleet, reference: dict[str, Any], part: str) -> None:
    load = asyncio.create_task(all_requests(fleet, per_model=24))
    # Strike while streams are open: when the fleet reports requests in its decode engines.
    await asyncio.to_thread(fleet.wait, lambda: decoding(fleet) >= 4, PATIENCE, "busy")
    killed = fleet.kill(*PARTS[part])
    answers = await load
    assert len(answers) == 72
    assert not differences(answers, reference)
    await asyncio.to_thread(fleet.wait_healthy)
    again = fleet.part(*PARTS[part])
    assert again is not None
    assert again.pid != killed
    await asyncio.to_thread(fleet.wait_pages_free)


def decoding(fleet: Fleet) -> int:
    models = fleet.get("/fleet").json()["unit"]["state"]["models"]
    return sum(model["decoding"] for model in models.values())


async def test_death_of_the_gateway_frees_everything(fleet: Fleet, reference: dict[str, Any]) -> None:
    load = asyncio.create_task(all_requests(fleet, per_model=24))
    await asyncio.to_thread(fleet.wait, lambda: decoding(fleet) >= 4, PATIENCE, "busy")
    fleet.kill("muxserve gateway")
    with pytest.raises((openai.APIConnectionError, openai.APIError, OSError)):
        await load
    await asyncio.to_thread(fleet.wait_pages_free)
    await asyncio.to_thread(fleet.wait_healthy)
    answer = await stream_chat(fleet.async_client(), "atlas", requests_for("atlas")[0])
    assert answer == reference["atlas"][0]
